"""The end of a prompt that `truncate` keeps, as text.

A shard tokenizes the text of a request again, between two steps of all other requests. It therefore gets no more text
than the kept tokens need, although a truncated prompt may have any length.
"""

from collections.abc import Sequence

from reference_server.errors import ValidationError
from reference_server.tokenizer import Tokenizer

#: A shorter prompt is sent as it is.
SHORT_CHARACTERS = 16_384
# Tokens before the kept ones: the text of some ends inside a character, or is tokenized in another way by itself.
_MARGINS = (32, 33, 34, 35, 64, 65, 256)


def text_of_last(
    tokenizer: Tokenizer, prompt: str, ids: Sequence[int], count: int, *, add_special_tokens: bool, least: int = 0
) -> str:
    """The end of `prompt`, at least `least` characters, whose last `count` tokens are those of `ids`.

    ids: all tokens of the prompt. Raises ValidationError if no short end has the same tokens.
    """
    if len(prompt) <= SHORT_CHARACTERS:
        return prompt
    kept = list(ids[-count:])
    for margin in _MARGINS:
        length = max(least, len(tokenizer.decode(ids[-count - margin :])))
        text = prompt[-length:] if length else ""
        if tokenizer.encode(text, add_special_tokens)[-count:] == kept:
            return text
    raise ValidationError(
        f"`inputs` has {len(prompt)} characters, and no short end of it has the same last {count} tokens (`truncate`): "
        "shorten `inputs`"
    )
