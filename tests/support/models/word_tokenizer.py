"""A `Tokenizer` with one token per word, and `<s>` (id 1) in front when special tokens are asked for."""

import re
from collections.abc import Sequence

FIRST_WORD_ID = 1000


class WordTokenizer:
    """Words get ids in the order in which they are first met."""

    vocab_size = 100_000
    special_ids = frozenset({1, 2})
    bos_id = 1
    eos_id = 2
    longest_token = None

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [token for token, _, _ in self.encode_with_offsets(text, add_special_tokens)]

    def encode_with_offsets(self, text: str, add_special_tokens: bool) -> list[tuple[int, int, int]]:
        words = [(self._id(match[0]), match.start(), match.end()) for match in re.finditer(r"\S+", text)]
        return [(1, 0, 0), *words] if add_special_tokens else words

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        words = {token: word for word, token in self._ids.items()}
        return " ".join(words[token] for token in ids if token in words)

    def _id(self, word: str) -> int:
        return self._ids.setdefault(word, FIRST_WORD_ID + len(self._ids))
