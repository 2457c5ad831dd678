"""Removes secrets from stored command lines and server configurations."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
# Words that mark a secret anywhere in a name, and pairs of words that do at its end.
_SECRET = re.compile(
    r"(?:^|[_-])(?:api[_-]?keys?|password|passwd|secrets?|authorization|credentials?)(?:$|[_-])"
    r"|(?:^|[_-])(?:hf|hub|hugging[_-]?face|hugging[_-]?face[_-]?hub|auth|access|bearer)[_-]tokens?$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a field, flag or variable of this name holds a secret.

    >>> [is_secret(name) for name in ("api_key", "--api-key", "HF_TOKEN", "max_total_tokens", "eos_token", "tokenizer")]
    [True, True, True, False, False, False]
    """
    return _SECRET.search(name) is not None


def redacted(value: Any) -> Any:
    """The same JSON with the values of secret fields masked; empty values stay."""
    if isinstance(value, Mapping):
        return {key: MASK if each and is_secret(str(key)) else redacted(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(each) for each in value]
    return value


def redacted_argv(argv: Sequence[str]) -> list[str]:
    """The same command line with the values of secret flags and variables masked.

    >>> redacted_argv(["HF_TOKEN=x", "serve", "--api-key", "abc", "--hf-token=def", "--port", "80"])
    ['HF_TOKEN=***', 'serve', '--api-key', '***', '--hf-token=***', '--port', '80']
    """
    redacted_words: list[str] = []
    is_value = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if is_value:
            redacted_words.append(MASK)
        elif equals and " " not in name and is_secret(name):
            redacted_words.append(f"{name}={MASK}")
        elif " " in word:
            redacted_words.append(_redacted_text(word))
        else:
            redacted_words.append(word)
        is_value = not is_value and not equals and word.startswith("-") and is_secret(word)
    return redacted_words


def _redacted_text(text: str) -> str:
    """Redact a command inside a command line, such as the value of `--server`; keeps its spaces."""
    parts = re.split(r"(\s+)", text)
    words = iter(redacted_argv(parts[::2]))
    return "".join(next(words) if index % 2 == 0 else part for index, part in enumerate(parts))
