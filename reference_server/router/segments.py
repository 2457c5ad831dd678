"""The 1,024-token rule: a generation runs in segments, each a request of its own to the scheduler.

K/V is reserved for at most one segment's new tokens. When a segment ends by length and the client asked for more, the
text so far is appended to the prompt and the whole is queued again. Here is only the arithmetic of that; infer.py does
it. A continuation asks for what is left, where the public implementation asks for the original number again, and stays
under the grammar of the whole, which the public one begins anew.
"""

from dataclasses import dataclass, replace

from reference_server.messages import FinishReason, GeneratedText

MAX_SEGMENT_TOKENS = 1024
SEED_STRIDE = 0x9E3779B97F4A7C15
"""What a seed gains, modulo 2^64, for each prompt token newly cut off by `truncate`."""


def requested_tokens(max_new_tokens: int | None, max_total_tokens: int, input_len: int) -> int:
    """New tokens that a generation asks for in all; unsaid, as many as fit."""
    return max(0, max_total_tokens - input_len) if max_new_tokens is None else max_new_tokens


def segment_tokens(requested: int) -> int:
    """Of them, those of the next segment.

    >>> segment_tokens(100), segment_tokens(3000)
    (100, 1024)
    """
    return min(requested, MAX_SEGMENT_TOKENS)


@dataclass(frozen=True, slots=True)
class Progress:
    """What the segments of one generation have brought so far, of `requested` tokens that its first one asked for."""

    requested: int
    generated: GeneratedText | None = None

    @property
    def whole_text(self) -> str:
        """The text so far, without a character that the last segment ended in the middle of: the next begins it anew.

        Such a one shows as U+FFFD; none of it has been streamed.
        """
        assert self.generated is not None, "a segment has ended"
        return self.generated.text.rstrip("\ufffd")

    @property
    def generated_tokens(self) -> int:
        return 0 if self.generated is None else self.generated.generated_tokens

    def add(self, segment: GeneratedText) -> "Progress":
        """Text and counts joined; the reason is the last segment's, the seed the first one's."""
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
        """The last segment ended for want of room, not because the generation had."""
        return (
            self.generated is not None
            and self.generated.finish_reason is FinishReason.LENGTH
            and self.generated_tokens < self.requested
        )

    def remaining(self, max_new_tokens: int | None) -> int | None:
        """`max_new_tokens` to validate the continuation with. Unsaid stays unsaid: the prompt has grown instead."""
        return None if max_new_tokens is None else max_new_tokens - self.generated_tokens

    def min_new_tokens(self, min_new_tokens: int) -> int:
        """What the continuation still has to produce before it may end."""
        return max(0, min_new_tokens - self.generated_tokens)


def continued_seed(seed: int, newly_cut: int) -> int:
    """Seed of a continuation, so that noise does not repeat.

    Noise hangs on the seed and the token's position. Positions go on by themselves, except for the `newly_cut` prompt
    tokens that `truncate` takes off the front of the longer prompt and took not off the first one.
    """
    return (seed + SEED_STRIDE * newly_cut) % 2**64
