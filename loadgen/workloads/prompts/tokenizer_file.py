"""A tokenizer.json that counts prompt tokens instead of the server."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from loadgen.errors import UsageError
from loadgen.workloads.prompts.vocabulary import CountTokens


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer with the digest of its file. `count` includes special tokens."""

    path: Path
    digest: str
    count: CountTokens

    @classmethod
    def read(cls, name: str) -> Self:
        """name: of the file or of its directory. Raises UsageError."""
        path = Path(name)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(
                f"`tokenizer` is {name!r}: {error.strerror}; give a tokenizer.json or the directory that holds it"
            ) from error
        return cls(path, hashlib.sha256(content).hexdigest(), _counter(content, path))


def _counter(content: bytes, path: Path) -> CountTokens:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"`tokenizer` is {str(path)!r}: not a tokenizer.json ({error})") from error
    return lambda text: len(tokenizer.encode(text).ids)
