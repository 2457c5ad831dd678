"""Text to token ids and back, the same on both sides of the wire.

Reads `tokenizer.json` with `tokenizers`; transformers, which imports torch, is only imported without such a file.
Streaming is in decoding/detokenize.py.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from reference_server.errors import StartupError
from reference_server.json_files import read_json
from reference_server.token_bytes import longest_token, token_bytes

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer(Protocol):
    """A tokenizer of the router and the model server.

    `special_ids` are the ids that `skip_special_tokens` skips. `vocab_size` is the model's, which may exceed the
    tokenizer's: ids that the tokenizer lacks decode to a placeholder such as `<|1234|>`. `is_bytewise`: decoding only
    joins the bytes of the tokens, so that texts of consecutive ids can be concatenated at character boundaries.
    """

    @property
    def is_bytewise(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest_token(self) -> int | None:
        """Bytes of text that one token stands for, at most; None if unknown."""
        ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_with_offsets(self, text: str, add_special_tokens: bool) -> list[tuple[int, int, int]]:
        """(id, start, stop) of each token, in characters of `text`; 0, 0 for a slow tokenizer."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def text_of(self, id_: int) -> str:
        """`decode([id_])`, cached."""
        ...


def load_tokenizer(
    directory: Path, vocab_size: int | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """Load the tokenizer in `directory`. Raises StartupError if that fails.

    vocab_size: of the model, if larger than the tokenizer's.
    """
    file = directory / "tokenizer.json"
    try:
        if file.is_file():
            return FastTokenizer(tokenizers.Tokenizer.from_file(str(file)), _special_tokens(directory), vocab_size)
        return _load_with_transformers(directory, vocab_size, revision, trust_remote_code)
    except Exception as error:
        raise StartupError("Tokenizer error: Unable to load tokenizer.") from error


class FastTokenizer:
    """A `tokenizers.Tokenizer`, with its truncation and padding switched off."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, special_tokens: dict[str, str], vocab_size: int | None = None
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
        own_size = max(ids, default=-1) + 1
        self._holes = frozenset(range(own_size)) - ids
        self._own_size = own_size
        self.vocab_size = max(own_size, vocab_size or 0)
        flagged = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        named = {id_ for token in special_tokens.values() if (id_ := _id_of(tokenizer, token)) is not None}
        self.special_ids: frozenset[int] = frozenset(flagged | named)
        self.bos_id: int | None = _id_of(tokenizer, special_tokens.get("bos_token"))
        self.eos_id: int | None = _id_of(tokenizer, special_tokens.get("eos_token"))
        self.is_bytewise = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self.longest_token = longest_token(tokenizer)
        self._texts: dict[int, str] = {}

    def token_bytes(self) -> list[bytes] | None:
        """The bytes of each of the `vocab_size` ids; None if they depend on neighbouring tokens."""
        return token_bytes(self._tokenizer, self.vocab_size)

    # `encode` holds the interpreter lock while it works, so a long prompt would stop every stream. The batch calls
    # release it.
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_with_offsets(self, text: str, add_special_tokens: bool) -> list[tuple[int, int, int]]:
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        # `offsets` would build all pairs in one call, which holds the lock too.
        spans = map(encoding.token_to_chars, range(len(encoding)))
        return [(id_, *(span or (0, 0))) for id_, span in zip(encoding.ids, spans, strict=True)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if not ids:
            return ""
        if max(ids) < self._own_size and not (self._holes and not self._holes.isdisjoint(ids)):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        return "".join(
            self._tokenizer.decode(list(run), skip_special_tokens=skip_special_tokens)
            if known
            else "".join(f"<|{id_}|>" for id_ in run)
            for known, run in groupby(ids, self._has)
        )

    def text_of(self, id_: int) -> str:
        text = self._texts.get(id_)
        if text is None:
            text = self._texts[id_] = self.decode([id_])
        return text

    def _has(self, id_: int) -> bool:
        return id_ < self._own_size and id_ not in self._holes


class SlowTokenizer:
    """A Python tokenizer of transformers, for models without a `tokenizer.json`."""

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._own_size = len(tokenizer)
        self.vocab_size = max(self._own_size, vocab_size or 0)
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        self.is_bytewise = False
        self.longest_token: int | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_with_offsets(self, text: str, add_special_tokens: bool) -> list[tuple[int, int, int]]:
        return [(id_, 0, 0) for id_ in self.encode(text, add_special_tokens)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            self._tokenizer.decode(list(run), skip_special_tokens=skip_special_tokens)
            if known
            else "".join(f"<|{id_}|>" for id_ in run)
            for known, run in groupby(ids, lambda id_: id_ < self._own_size)
        )

    def text_of(self, id_: int) -> str:
        return self.decode([id_])


def _id_of(tokenizer: tokenizers.Tokenizer, token: str | None) -> int | None:
    if token is None:
        return None
    id_: int | None = tokenizer.token_to_id(token)
    return id_


def _special_tokens(directory: Path) -> dict[str, str]:
    """Name -> token, from special_tokens_map.json and tokenizer_config.json; the second takes precedence."""
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = directory / name
        if not file.is_file():
            continue
        settings = read_json(file)
        tokens |= _texts((key, settings.get(key)) for key in _SPECIAL_TOKENS)
        for key in ("additional_special_tokens", "extra_special_tokens"):
            extra = settings.get(key) or []
            tokens |= _texts(extra.items() if isinstance(extra, dict) else ((str(each), each) for each in extra))
    return tokens


def _texts(tokens: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Texts of tokens, which are strings or objects with `content`."""
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _load_with_transformers(
    directory: Path, vocab_size: int | None, revision: str | None, trust_remote_code: bool
) -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, revision=revision, trust_remote_code=trust_remote_code)
    if getattr(tokenizer, "is_fast", False):
        tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        return FastTokenizer(tokenizer.backend_tokenizer, tokens, vocab_size)
    return SlowTokenizer(tokenizer, vocab_size)
