"""Types that settings of several subjects have."""

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from loadgen.config.durations import parse_duration
from loadgen.config.parsing import FILE, TIME

Seconds = Annotated[float, BeforeValidator(parse_duration), Field(ge=0, le=7 * 86_400), TIME]
FileText = Annotated[str, FILE]


def as_text(value: object) -> object:
    """A number as text, so that a file may have either."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if is_number else value


def as_tuple(value: object) -> object:
    """One text as a tuple of one."""
    return (value,) if isinstance(value, str) else value


def accepted_by(parse: Callable[[str], object]) -> AfterValidator:
    """A check of a text that stays a text: `parse` raises ValueError if it does not accept it."""

    def check(value: str) -> str:
        parse(value)
        return value

    return AfterValidator(check)
