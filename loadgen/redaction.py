"""Removes secrets from stored command lines, server configurations and messages."""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

MASK = "***"
HEADER_FLAG = "--header"
# A name whose last word is or ends in a word for a secret, or that has one of the unmistakable words anywhere.
_SECRET = re.compile(
    r"(?:token|keys?|secrets?|password|passwd|passphrase|authorization|credentials?)$"
    r"|(?:^|[_-])(?:api[_-]?keys?|password|passwd|secrets?|authorization|credentials?)(?:$|[_-])",
    re.IGNORECASE,
)
# Tokens of a vocabulary, and times of one token.
_NO_SECRET = re.compile(
    r"(?:^|[_-])(?:eos|bos|pad|unk|sep|cls|mask|image|audio|video|special|input|output|first|next|last|per|end|start)"
    r"[_-]?token$",
    re.IGNORECASE,
)
_USER_OF_URL = re.compile(r"(?<=://)[^\s/?#'\"]*@")
_QUERY = re.compile(r"([?&])([^=&\s?#]+)=([^&\s#'\"]+)")
_HEADER = re.compile(r"([A-Za-z][\w-]*)(\s*:\s*)((?:Bearer|Basic|Token)\s+)?([^\s'\"]+)", re.IGNORECASE)
_BEARER = re.compile(r"\b(Bearer\s+)[^\s'\",]+", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a field, flag or variable of this name holds a secret.

    >>> [is_secret(name) for name in ("api_key", "--token", "GITHUB_TOKEN", "NGROK_AUTHTOKEN", "OPENAI_KEY")]
    [True, True, True, True, True]
    >>> [is_secret(name) for name in ("max_total_tokens", "eos_token", "tokenizer", "time_per_output_token")]
    [False, False, False, False]
    """
    return _SECRET.search(name) is not None and _NO_SECRET.search(name) is None


def redacted_text(text: str) -> str:
    """A text without user-info and secret parameters of URLs, and without the values of secret headers.

    >>> redacted_text("postgresql://me:pass@db/s and http://h/?token=t&n=1, Authorization: Bearer abc")
    'postgresql://***@db/s and http://h/?token=***&n=1, Authorization: Bearer ***'
    """
    text = _USER_OF_URL.sub(f"{MASK}@", text)
    text = _QUERY.sub(lambda m: f"{m[1]}{m[2]}={MASK}" if is_secret(m[2]) else m[0], text)
    text = _HEADER.sub(lambda m: f"{m[1]}{m[2]}{m[3] or ''}{MASK}" if is_secret(m[1]) else m[0], text)
    return _BEARER.sub(rf"\g<1>{MASK}", text)


def redacted(value: Any) -> Any:
    """The same JSON with secrets masked: values of secret fields, and parts of texts; empty values stay."""
    if isinstance(value, Mapping):
        return {key: MASK if each and is_secret(str(key)) else redacted(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(each) for each in value]
    return redacted_text(value) if isinstance(value, str) else value


def redacted_argv(argv: Sequence[str]) -> list[str]:
    """The same command line with the values of secret flags and variables masked.

    A header keeps its name.

    >>> redacted_argv(["HF_TOKEN=x", "serve", "--api-key", "abc", "--hf-token=def", "--port", "80"])
    ['HF_TOKEN=***', 'serve', '--api-key', '***', '--hf-token=***', '--port', '80']
    >>> redacted_argv(["--header", "X-Key=abc", "--header=X-Key=abc"])
    ['--header', 'X-Key=***', '--header=X-Key=***']
    """
    redacted: list[str] = []
    words = iter(argv)
    for word in words:
        redacted.append(_redacted_word(word))
        if word == HEADER_FLAG:
            redacted += [_redacted_header(value) for value in islice(words, 1)]
        elif word.startswith("-") and "=" not in word and is_secret(word):
            redacted += [MASK for _ in islice(words, 1)]
    return redacted


def _redacted_word(word: str) -> str:
    name, equals, value = word.partition("=")
    if name == HEADER_FLAG and equals:
        return f"{HEADER_FLAG}={_redacted_header(value)}"
    if equals and " " not in name and "://" not in name and is_secret(name):
        return f"{name}={MASK}"
    return _redacted_words(redacted_text(word)) if " " in word else redacted_text(word)


def _redacted_header(header: str) -> str:
    return f"{header.partition('=')[0]}={MASK}"


def _redacted_words(text: str) -> str:
    """Redact a command inside a command line, such as the value of `--server`; keeps its spaces."""
    parts = re.split(r"(\s+)", text)
    words = iter(redacted_argv(parts[::2]))
    return "".join(next(words) if index % 2 == 0 else part for index, part in enumerate(parts))
