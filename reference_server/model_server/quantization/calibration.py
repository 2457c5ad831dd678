"""Calibration text as windows of tokens: a file that the user gives, or the training text of WikiText-2."""

import random
from collections.abc import Callable
from pathlib import Path

from reference_server.errors import ArgumentError, StartupError
from reference_server.model_server.weights.hub import first_line
from reference_server.tokenizer import Tokenizer

DATASET = "Salesforce/wikitext"
DATASET_FILE = "wikitext-2-raw-v1/train-00000-of-00001.parquet"
DEFAULT_LEN = 2048

FetchDataset = Callable[[str, str], str]
"""Brings a file of a dataset to this machine: its repository and its path there."""


def read_text(path: Path) -> str:
    """A text file given by the user. Raises ArgumentError where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"`--calibration-file {path}` cannot be read as text: {error}") from error


def read_default(fetch: FetchDataset) -> str:
    """WikiText-2's training text, its lines joined by blank lines. Raises StartupError where the hub has no answer."""
    try:
        path = fetch(DATASET, DATASET_FILE)
    except Exception as error:
        raise StartupError(
            f"the calibration text, {DATASET_FILE} of the dataset {DATASET}, is not in the cache and could not be "
            f"downloaded ({first_line(error)}): give a text of your own with `--calibration-file`"
        ) from error
    import pyarrow.parquet

    return "\n\n".join(pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist())


def window_len(asked: int | None, most: int | None) -> int:
    """Tokens of a window: `--seqlen`, or 2048 where the model's positions are as many. Raises ArgumentError."""
    if asked is not None and most is not None and asked > most:
        raise ArgumentError(f"`--seqlen` is {asked} but the model has {most} positions")
    return asked or min(DEFAULT_LEN, most or DEFAULT_LEN)


def windows(tokenizer: Tokenizer, text: str, num_windows: int, length: int, seed: int) -> list[list[int]]:
    """`num_windows` stretches of `length` tokens from random places of `text`; they may overlap.

    The same seed gives the same ones. Raises ArgumentError for a text that is shorter.
    """
    ids = tokenizer.encode(text, add_special_tokens=True)
    if len(ids) < length:
        raise ArgumentError(
            f"the calibration text has {len(ids)} tokens, and one window has {length}: give a longer text or a lower "
            "`--seqlen`"
        )
    generator = random.Random(seed)
    starts = [generator.randint(0, len(ids) - length) for _ in range(num_windows)]
    return [ids[start : start + length] for start in starts]
