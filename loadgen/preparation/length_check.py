"""Checks that generated prompts have their planned lengths: counts them again, or estimates the error."""

import math
from dataclasses import dataclass

from loadgen.preparation.token_counter import TokenCounter
from loadgen.workloads.prompts.prompt import Prompt
from loadgen.workloads.prompts.vocabulary import Vocabulary
from loadgen.workloads.workload import Workload

CHECKED_PROMPTS = 16
ESTIMATED_LENGTHS = (32, 128)
# One token of the longer text.
LEAST_ESTIMATE_PERCENT = 1


@dataclass(frozen=True, slots=True)
class LengthCheck:
    """Generated prompts that were counted again, and the largest difference from their planned length in tokens."""

    checked: int
    largest_error: int

    @property
    def is_exact(self) -> bool:
        return self.largest_error == 0


def length_estimate(counter: TokenCounter, vocabulary: Vocabulary, key: str) -> str | None:
    """How far prompts may be from their planned length, by two texts not of the run; None if all are counted."""
    if not counter.is_costly:
        return None
    texts = {tokens: vocabulary.write(tokens, f"estimate:{key}:{tokens}") for tokens in ESTIMATED_LENGTHS}
    error = max(abs(counter.count(text) - tokens) / tokens for tokens, text in texts.items())
    percent = max(LEAST_ESTIMATE_PERCENT, math.ceil(100 * error))
    return f"estimated (±{percent} %, measured on {len(texts)} texts)"


def check_first_prompts(work: Workload, counter: TokenCounter | None) -> LengthCheck | None:
    """The check of the first prompts; None if counting would send them to the server before the run."""
    if counter is None or counter.is_costly:
        return None
    return check_lengths(work.first(CHECKED_PROMPTS), counter)


def check_lengths(prompts: list[Prompt], counter: TokenCounter) -> LengthCheck:
    """Count generated prompts and compare with their planned lengths."""
    errors = [abs(counter.count(prompt.text) - (prompt.input_tokens or 0)) for prompt in prompts]
    return LengthCheck(len(errors), max(errors, default=0))
