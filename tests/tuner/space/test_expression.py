import pytest

from tuner.space.expression import ExpressionError, parse


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("not prefill_chunking", {"prefill_chunking": True}, False),
        ("quantize in ['none', 'fp8']", {"quantize": "eetq"}, False),
        ("1 < a <= 3 and a != 2", {"a": 3}, True),
        ("a * 2 - 1 > b / 4 or b == -8", {"a": 0, "b": -8}, True),
        ("quantize not in ('awq',)", {"quantize": "awq"}, False),
    ],
)
def test_an_expression_has_the_value_of_the_python_expression(text, values, expected):
    assert parse(text).evaluate(values) is expected


def test_an_expression_lists_the_settings_that_it_reads():
    assert parse("quantize == 'x' and budget > 3").names == {"quantize", "budget"}


@pytest.mark.parametrize("text", ["__import__('os')", "a.b", "[x for x in y]", "a ** 9", "lambda: 1", "a[0]", "f'{a}'"])
def test_unsupported_syntax_is_refused_by_the_parser(text):
    with pytest.raises(ExpressionError, match="uses"):
        parse(text)


@pytest.mark.parametrize("text", ["", "a ==", "1 +"])
def test_text_without_an_expression_is_refused(text):
    with pytest.raises(ExpressionError, match="not an expression"):
        parse(text)


def test_an_unknown_name_is_named():
    with pytest.raises(ExpressionError, match="`budgett`"):
        parse("budgett > 1").evaluate({"budget": 2})


def test_values_that_do_not_compare_are_an_expression_error():
    with pytest.raises(ExpressionError, match="cannot be computed"):
        parse("quantize > 3").evaluate({"quantize": "none"})
