"""Who counts the tokens of a prompt: a tokenizer file, or the server's own route."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loadgen.config import BenchConfig
from loadgen.control import ControlClient
from loadgen.datasets.prompt import Prompt
from loadgen.datasets.vocabulary import CalibrationError, CountTokens, Vocabulary, calibrate
from loadgen.errors import TargetError, UsageError

VERIFIED_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts tokens, special ones included. `digest` tells tokenizers apart where it is a file."""

    count: CountTokens
    source: str
    digest: str | None = None


def open_counter(config: BenchConfig, control: ControlClient) -> TokenCounter:
    """The counter a config asks for. Raises UsageError."""
    if config.tokenizer is None:
        return TokenCounter(control.count_tokens, "/tokenize")
    path = Path(config.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"`tokenizer` is {config.tokenizer!r}: {error.strerror}") from error
    return TokenCounter(_count_with_file(content, path), str(path), hashlib.sha256(content).hexdigest())


def _count_with_file(content: bytes, path: Path) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"`tokenizer` is {str(path)!r}: not a tokenizer.json ({error})") from error
    return lambda text: len(tokenizer.encode(text).ids)


def make_vocabulary(counter: TokenCounter) -> Vocabulary:
    """The words that prompts are made of. Raises UsageError or TargetError."""
    try:
        return calibrate(counter.count)
    except CalibrationError as error:
        raise UsageError(f"prompts of exact length cannot be made with {counter.source}: {error}") from error
    except TargetError as error:
        if error.status is None:
            raise
        raise UsageError(
            f"the server does not count tokens ({error}); give --tokenizer with its tokenizer.json"
        ) from error


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """How many prompts were counted again as written, and by how many tokens the worst one was off."""

    checked: int
    largest_error: int

    @property
    def is_exact(self) -> bool:
        return self.largest_error == 0


def verify(prompts: list[Prompt], counter: TokenCounter) -> RoundTrip:
    """Count written prompts and compare with their planned lengths."""
    errors = [abs(counter.count(prompt.text) - (prompt.input_tokens or 0)) for prompt in prompts[:VERIFIED_PROMPTS]]
    return RoundTrip(len(errors), max(errors, default=0))
