"""Calibration text as windows of tokens: from a file, or from the training text of WikiText-2."""

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
"""Downloads a file of a dataset, given repository and path; returns the local path."""


def read_text(path: Path) -> str:
    """Read a text file. Raises ArgumentError if that fails."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"could not read `--calibration-file {path}` as text: {error}") from error


def read_default(fetch: FetchDataset) -> str:
    """WikiText-2's training text, lines separated by blank lines. Raises StartupError if the download fails."""
    try:
        path = fetch(DATASET, DATASET_FILE)
    except Exception as error:
        raise StartupError(
            f"could not download the calibration text, {DATASET_FILE} of the dataset {DATASET} "
            f"({first_line(error)}): use your own text with `--calibration-file`"
        ) from error
    import pyarrow.parquet

    return "\n\n".join(pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist())


def window_len(seqlen: int | None, max_positions: int | None) -> int:
    """Tokens of a window: `--seqlen`, else 2048 or the positions of the model. Raises ArgumentError."""
    if seqlen is not None and max_positions is not None and seqlen > max_positions:
        raise ArgumentError(f"`--seqlen` is {seqlen} but the model has {max_positions} positions")
    return seqlen or min(DEFAULT_LEN, max_positions or DEFAULT_LEN)


def windows(tokenizer: Tokenizer, text: str, num_windows: int, length: int, seed: int) -> list[list[int]]:
    """`num_windows` windows of `length` tokens from random places of `text`; they may overlap.

    The result depends only on text and seed. Raises ArgumentError for a text shorter than a window.
    """
    ids = tokenizer.encode(text, add_special_tokens=True)
    if len(ids) < length:
        raise ArgumentError(
            f"the calibration text has {len(ids)} tokens, but a window needs {length}: use a longer text or a lower "
            "`--seqlen`"
        )
    generator = random.Random(seed)
    starts = [generator.randint(0, len(ids) - length) for _ in range(num_windows)]
    return [ids[start : start + length] for start in starts]
