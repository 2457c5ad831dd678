import pytest

from reference_server.messages import FinishReason, StoppingParameters
from reference_server.model_server.decoding.stopping import StoppingCriteria

EOS = 2


def criteria(*stop_sequences, max_new_tokens=100, **parameters):
    return StoppingCriteria(StoppingParameters(max_new_tokens, stop_sequences, **parameters), frozenset({EOS, 9}))


def reasons(criteria, *texts):
    return [criteria.finish_reason(5, text) for text in texts]


def test_model_server_M6_one_token_is_the_whole_length():
    assert criteria(max_new_tokens=1).finish_reason(5, "a") is FinishReason.LENGTH


def test_model_server_M7_length_wins_over_eos_on_the_last_token():
    assert criteria(max_new_tokens=1).finish_reason(EOS, "</s>") is FinishReason.LENGTH
    assert criteria(max_new_tokens=2).finish_reason(EOS, "</s>") is FinishReason.EOS_TOKEN


def test_model_server_M7_generation_continues_after_an_ignored_eos():
    assert criteria(max_new_tokens=2, ignore_eos_token=True).finish_reason(EOS, "</s>") is None


def test_every_id_of_the_eos_set_ends():
    assert criteria().finish_reason(9, "<|eot|>") is FinishReason.EOS_TOKEN


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("/test", None),
        ("/test;", FinishReason.STOP_SEQUENCE),
        ("/test; ", None),
        ("/test;\n", FinishReason.STOP_SEQUENCE),
        ("/test;\n\n", None),
        ("/test;\n ", None),
    ],
)
def test_model_server_M8_stop_string_is_a_suffix_or_followed_by_one_newline(tail, expected):
    assert criteria("/test;").finish_reason(5, tail) is expected


def test_model_server_M8_stop_strings_are_literal():
    assert criteria("<|stop|>").finish_reason(5, "stop") is None
    assert criteria("<|stop|>").finish_reason(5, "<|stop|>") is FinishReason.STOP_SEQUENCE


def test_stop_string_may_span_tokens():
    assert reasons(criteria("/test;"), "a /", "te", "", "st", ";") == [None, None, None, None, "stop_sequence"]


def test_stop_string_that_ends_inside_a_token_is_missed():
    assert reasons(criteria("b"), "abc", "c", "b") == [None, None, "stop_sequence"]


def test_below_min_new_tokens_the_tail_is_kept_but_not_tested():
    stopping = criteria("ab", "c", min_new_tokens=3)

    assert reasons(stopping, "c", "a", "b") == [None, None, "stop_sequence"]


def test_a_stop_string_longer_than_the_usual_tail_is_found():
    stop = "x" * 500

    assert reasons(criteria(stop, max_new_tokens=1000), *"x" * 500)[-2:] == [None, FinishReason.STOP_SEQUENCE]


def test_a_long_stop_string_is_found_after_its_newline_too():
    stop = "abcdefghij" * 50

    assert reasons(criteria(stop, max_new_tokens=1000), "z" * 400, stop[:-1], stop[-1] + "\n")[-1] == "stop_sequence"


def test_tokens_are_counted():
    stopping = criteria(max_new_tokens=3)
    reasons(stopping, "a", "b")

    assert (stopping.num_tokens, stopping.remaining_tokens) == (2, 1)
