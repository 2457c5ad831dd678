"""Limits of a regex, and the refusal of one that does not parse."""

import random
import re

import pytest

from reference_server.errors import GenerationError, ValidationError
from reference_server.grammars.limits import check_regex, repetitions


@pytest.mark.parametrize(
    ("regex", "count"),
    [
        ("a+b", 1), ("a{7}", 7), ("(a{3}b{5}){4}", 20), ("((a{2}){3}){4}", 24), (r"\{5}a{2}", 2), ("[{9}]{2}", 2),
        ("a{2,}", 2), ("a{2,6}", 6), ("[]{9}]{3}", 3), ("(a{2}", 2), ("a)b{3}", 3), ("a{,5}", 5),
        ("x{99999999999}", 999999999),
    ],
)  # fmt: skip
def test_counted_repetitions_multiply_where_they_nest(regex: str, count: int):
    assert repetitions(regex) == count


@pytest.mark.parametrize(
    ("regex", "detail"),
    [
        ("(", "unclosed group"), ("(?=a)b", "look-around"), (r"(a)\1", "backreferences"), (r"\bfoo", "lookarounds"),
        ("[z-a]", "invalid character class range"), ("a\\", "incomplete escape"), ("a{3,2}", "invalid repetition"),
    ],
)  # fmt: skip
def test_a_regex_that_does_not_parse_is_refused_with_the_reason(regex: str, detail: str):
    with pytest.raises(GenerationError) as caught:
        check_regex(regex)

    assert caught.value.detail.startswith(f"grammar is not valid: {detail}")


@pytest.mark.parametrize(
    ("regex", "limit"), [("a" * 65_537, "length"), ("((a{30}){30}){30}", "counted"), ("(a{10001})?", "counted")]
)
def test_reliability_4_5_57_a_regex_beyond_a_limit_is_refused(regex: str, limit: str):
    with pytest.raises(ValidationError) as caught:
        check_regex(regex)

    assert caught.value.detail.startswith(f"grammar is not valid: too complex ({limit}")


@pytest.mark.parametrize(
    "regex",
    [
        "".join(f"[{letter}-z]?" for letter in "abcdefgh" * 300),
        "x{50}" + "[a-z]?" * 5000,
        "|".join("".join(random.Random(seed).choices("abcdefghijklmnop", k=5)) for seed in range(10_900)),
    ],
    ids=["wide_at_start", "wide_later", "many_words"],
)
def test_reliability_Q13_a_regex_whose_automaton_would_hold_up_a_batch_is_refused(regex: str):
    with pytest.raises(ValidationError) as caught:
        check_regex(regex)

    # The first limit reached depends on the machine.
    assert re.match(r"grammar is not valid: too complex \((states|time): ", caught.value.detail)


@pytest.mark.parametrize(
    "regex",
    ["((a+)+)+b", "", "|".join(f"word{i}" for i in range(6000)), "(a|b)*a(a|b){20}", "^a$",
     r"\p{Greek}{9}", "a\\\\", "a/b"],
    ids=["nested_quantifiers", "empty", "many_words", "exponential", "anchored", "classes", "backslash", "slash"],
)  # fmt: skip
def test_reliability_4_5_56_to_58_unusual_regexes_are_served(regex: str):
    check_regex(regex)
