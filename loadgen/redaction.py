"""Secrets out of what is stored: command lines, and what servers say of their configuration."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
# Words of a name that hold a secret by themselves, and those that do as its last word after another.
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
    """The same JSON with the values of secret fields masked; what is empty stays, as it tells nothing."""
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
    shown: list[str] = []
    is_value = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if is_value:
            shown.append(MASK)
        elif equals and " " not in name and is_secret(name):
            shown.append(f"{name}={MASK}")
        elif " " in word:
            shown.append(_redacted_text(word))
        else:
            shown.append(word)
        is_value = not is_value and not equals and word.startswith("-") and is_secret(word)
    return shown


def _redacted_text(text: str) -> str:
    """A command inside a command line, such as the value of `--server`; its spaces are kept."""
    parts = re.split(r"(\s+)", text)
    words = iter(redacted_argv(parts[::2]))
    return "".join(next(words) if index % 2 == 0 else part for index, part in enumerate(parts))
