"""Segments: a generation runs in parts of at most 1,024 new tokens, each its own request to the scheduler.

K/V is reserved for one segment only. When a segment ends by length and the client requested more tokens, infer.py
appends the text so far to the prompt and queues both again. This module is the arithmetic of that. Two differences from
TGI: a continuation requests only the remaining tokens, and it continues the grammar instead of restarting it.
"""

from dataclasses import dataclass, replace

from reference_server.messages import FinishReason, GeneratedText

MAX_SEGMENT_TOKENS = 1024
SEED_STRIDE = 0x9E3779B97F4A7C15
"""Added to a seed, modulo 2^64, for each prompt token that `truncate` newly removes."""


def requested_tokens(max_new_tokens: int | None, max_total_tokens: int, input_len: int) -> int:
    """New tokens that a generation requests in all; by default as many as fit."""
    return max(0, max_total_tokens - input_len) if max_new_tokens is None else max_new_tokens


def segment_tokens(requested: int) -> int:
    """New tokens of the next segment.

    >>> segment_tokens(100), segment_tokens(3000)
    (100, 1024)
    """
    return min(requested, MAX_SEGMENT_TOKENS)


@dataclass(frozen=True, slots=True)
class SegmentProgress:
    """Output of a generation's segments so far, and the tokens that it requests in all."""

    requested: int
    generated: GeneratedText | None = None

    @property
    def whole_text(self) -> str:
        """The text so far, without an incomplete last character: the next segment generates that character again.

        An incomplete character reads as U+FFFD and has not been streamed.
        """
        assert self.generated is not None, "a segment has ended"
        return self.generated.text.rstrip("\ufffd")

    @property
    def generated_tokens(self) -> int:
        return 0 if self.generated is None else self.generated.generated_tokens

    def add(self, segment: GeneratedText) -> "SegmentProgress":
        """Join texts and counts; keep the last finish reason and the first seed."""
        if self.generated is None:
            return replace(self, generated=segment)
        joined = replace(
            self.generated,
            text=self.whole_text + segment.text,
            generated_tokens=self.generated.generated_tokens + segment.generated_tokens,
            finish_reason=segment.finish_reason,
        )
        return replace(self, generated=joined)

    @property
    def wants_more(self) -> bool:
        """Whether the last segment ended by length before the requested tokens were generated."""
        return (
            self.generated is not None
            and self.generated.finish_reason is FinishReason.LENGTH
            and self.generated_tokens < self.requested
        )

    def remaining(self, max_new_tokens: int | None) -> int | None:
        """`max_new_tokens` of the continuation; None stays None, since the longer prompt already leaves less room."""
        return None if max_new_tokens is None else max_new_tokens - self.generated_tokens

    def min_new_tokens(self, min_new_tokens: int) -> int:
        """`min_new_tokens` of the continuation."""
        return max(0, min_new_tokens - self.generated_tokens)


def continued_seed(seed: int, newly_truncated: int) -> int:
    """Seed of a continuation, so that no random number repeats.

    Sampling noise is a function of the seed and the token's position. `truncate` removes `newly_truncated` more tokens
    from the longer prompt than from the first one, so positions shift back by as many.
    """
    return (seed + SEED_STRIDE * newly_truncated) % 2**64
