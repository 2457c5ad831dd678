"""The words of prompts, found once for each tokenizer: scripted servers of many tests count tokens alike."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loadgen.preparation import prepare_run
from loadgen.workloads.prompts.vocabulary import CANDIDATES, CountTokens, Vocabulary, calibrate

PROBES = ("", "a", "the of and", " ".join(CANDIDATES), "".join(CANDIDATES), " ".join(reversed(CANDIDATES)))
"""Tokenizers that count these alike are taken for the same."""


@contextmanager
def remembered_vocabularies() -> Iterator[None]:
    """Runs of this process send a few counts before a load, in place of hundreds."""
    found: dict[tuple[int, ...], Vocabulary] = {}

    def remembered(count: CountTokens) -> Vocabulary:
        key = tuple(count(probe) for probe in PROBES)
        if key not in found:
            found[key] = calibrate(count)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_run, "calibrate", remembered)
        yield
