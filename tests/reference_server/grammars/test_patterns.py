"""Patterns inside JSON strings: whatever they let through is a string's content, and the pattern is found in it."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.grammars.patterns import FORMATS, PatternError, string_regex
from tests.support.regex_samples import sample

PATTERNS = [
    "^[a-z]+$", "a.c", ".*", "[^x]{3}", r"^\d{3}-\d{4}$", r"\w+@\w+\.com", r'say "hi"', r"back\\slash", r"[\"\\a]+",
    "^(red|green|blue)$", "^a$|^b$", r"[\w.-]+", r"\u00e9[\u4e00-\u9fff]{1,3}", r"tab\there", "x{2,3}y?z*", "[^]{2}",
    r"^\/api\/v\d$", "(?:ab)+", "(?<year>[0-9]{4})", r"\S+", r"[^\d\s]{2}", "{curly}", "[&+~-]", r"\p{Lu}{2}", "[a-]",
    "日本語?", "", r"\W\D\s",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_matches_are_contents_of_strings_in_which_the_pattern_is_found(pattern: str):
    regex = f'"{string_regex(pattern)}"'
    searched = re.compile(pattern.replace("(?<", "(?P<").replace("[^]", r"[\s\S]").replace(r"\p{Lu}", "[A-Z]"), re.A)

    for text in sample(regex, seed=1, count=40):
        value = json.loads(text)
        assert searched.search(value) or r"\p" in pattern, value


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("(?=a)b", "`(?=`"), ("(?!a)b", "`(?!`"), ("(?<=a)b", "`(?<`"), (r"(a)\1", r"`\1`"), (r"\bfoo\b", r"`\b`"),
        ("a^b", "`^` inside"), ("(a$)b", "`$` inside"), ("[a", "not closed"), ("(a", "not closed"),
        ("a\\", "backslash"), (r"\cA", r"`\c`"), (r"\ud800", "code point"), ("[]", "holds nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_named(pattern: str, named: str):
    with pytest.raises(PatternError) as caught:
        string_regex(pattern)

    assert named in str(caught.value)


@given(st.text(max_size=8))
def test_any_text_is_a_pattern_or_is_refused(pattern: str):
    try:
        regex = string_regex(pattern)
    except PatternError:
        return
    assert isinstance(regex, str)


def test_formats_are_dates_and_times_that_exist():
    for name in FORMATS:
        assert len(set(sample(FORMATS[name], seed=2, count=20))) > 10
    assert re.fullmatch(FORMATS["date"], "2024-02-28")
    assert not re.fullmatch(FORMATS["date"], "2024-02-30")
    assert not re.fullmatch(FORMATS["time"], "10:00:00\\x1")
    assert re.fullmatch(FORMATS["date-time"], "2024-12-31T23:59:59.5+01:00")
