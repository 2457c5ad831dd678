import doctest

import pytest

from reference_server.messages import FinishReason, GeneratedText
from reference_server.router.scheduling import segments
from reference_server.router.scheduling.segments import (
    SEED_STRIDE,
    SegmentProgress,
    continued_seed,
    requested_tokens,
    segment_tokens,
)


def segment(tokens: int, reason: FinishReason = FinishReason.LENGTH, text: str = "x", seed: int | None = None):
    return GeneratedText(text, tokens, reason, seed)


def test_scheduling_S34_three_thousand_tokens_run_in_three_segments_and_end_at_three_thousand():
    progress, requested = SegmentProgress(requested=3000), []
    while progress.generated is None or progress.wants_more:
        left = progress.remaining(3000)
        requested.append(segment_tokens(requested_tokens(left, 4096, 100 + progress.generated_tokens)))
        progress = progress.add(segment(requested[-1]))

    assert requested == [1024, 1024, 952]
    assert progress.generated_tokens == 3000
    assert progress.generated == GeneratedText("xxx", 3000, FinishReason.LENGTH)


def test_without_max_new_tokens_a_generation_requests_as_many_as_fit():
    progress = SegmentProgress(requested_tokens(None, 2048, 10)).add(segment(1024))

    assert progress.requested == 2038
    assert progress.remaining(None) is None
    assert segment_tokens(requested_tokens(None, 2048, 10 + 1024)) == 1014


def test_a_prompt_longer_than_the_total_limit_requests_no_tokens():
    assert requested_tokens(None, 100, 120) == 0


@pytest.mark.parametrize("reason", [FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE])
def test_only_a_segment_that_ended_by_length_is_continued(reason):
    assert not SegmentProgress(requested=3000).add(segment(1024, reason)).wants_more


def test_a_complete_generation_is_not_continued():
    assert not SegmentProgress(requested=1024).add(segment(1024)).wants_more


def test_joined_segments_have_the_last_reason_and_the_first_seed():
    progress = SegmentProgress(requested=3000).add(segment(1024, text="ab", seed=7))
    whole = progress.add(segment(3, FinishReason.EOS_TOKEN, text="cd", seed=9)).generated

    assert whole == GeneratedText("abcd", 1027, FinishReason.EOS_TOKEN, seed=7)


def test_an_incomplete_last_character_is_generated_again():
    progress = SegmentProgress(requested=3000).add(segment(1024, text="a\ufffdb\ufffd"))

    assert progress.whole_text == "a\ufffdb"
    whole = progress.add(segment(1024, text="é\ufffd")).generated
    assert whole == GeneratedText("a\ufffdbé\ufffd", 2048, FinishReason.LENGTH)


def test_min_new_tokens_counts_tokens_of_earlier_segments():
    progress = SegmentProgress(requested=3000).add(segment(1024))

    assert progress.min_new_tokens(1500) == 476
    assert progress.min_new_tokens(1000) == 0


def test_http_3_3_a_cut_prompt_shifts_the_seed():
    assert continued_seed(5, 0) == 5
    assert continued_seed(5, 3) == (5 + 3 * SEED_STRIDE) % 2**64


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(segments).failed == 0
