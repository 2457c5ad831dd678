"""A report as data: sections of facts, tables, figures and text, which the renderers turn into bytes."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd

from reports.text import file_name, legible, legible_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "–"


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height of a figure in CSS pixels at its natural scale."""

    width: int
    height: int
    is_narrow: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number in a table with its interval. A change has its sign.

    An unsupported one has no interval and is marked: ≥ a lower bound, or a high percentile of a run that is too short,
    ~ any other.
    needed: requests at this load that would support an interval, or one narrower than the value.
    """

    value: float | None
    lo: float | None = None
    hi: float | None = None
    is_supported: bool = True
    is_change: bool = False
    needed: int | None = None
    is_high: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.interval})" if self.interval else self.text

    @property
    def text(self) -> str:
        """The value without its interval, marked if unsupported."""
        if self.value is None:
            return MISSING
        return ("" if self.is_supported else "≥" if self.is_high else "~") + self._number(self.value)

    @property
    def interval(self) -> str:
        """`12.1–13.4`, for a change `-1.20 to +3.40`; `needs 9,000`; empty without either."""
        needs = [] if self.needed is None or self.value is None else [f"needs {about(self.needed):,}"]
        if self.value is None or self.lo is None or self.hi is None or not self.is_supported:
            return "".join(needs)
        return ", ".join([f"{self._number(self.lo)}{' to ' if self.is_change else '–'}{self._number(self.hi)}", *needs])

    def _number(self, value: float) -> str:
        return ("+" if self.is_change and value > 0 else "") + format_number(value)


def about(count: int) -> int:
    """A number of requests with two significant digits.

    >>> [about(count) for count in (6, 72, 368, 8_951, 123_456)]
    [6, 72, 370, 9000, 120000]
    """
    return int(float(f"{count:.1e}"))


def format_number(value: float) -> str:
    """An integer with all digits; a float with three significant digits below 1,000 and without decimals above.

    >>> [format_number(x) for x in (0.01234, 1.0, 12.345, 999.6, 12345.6, 0.0, 12345, 7)]
    ['0.0123', '1.00', '12.3', '1,000', '12,346', '0', '12,345', '7']
    """
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values in groups, which are laid out side by side."""

    groups: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Headline numbers: title, value, and unit with the arrow of the better direction."""

    tiles: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A frame of text, numbers and `Estimate`s; the first column holds the row names."""

    title: str
    frame: pd.DataFrame
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure that `draw` makes for a size; `name` is the file name, `height` scales the default height."""

    name: str
    title: str
    caption: str
    alt: str
    draw: "Callable[[Size], Figure]"
    is_full_width: bool = False
    height: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `is_code` marks a command line."""

    text: str
    is_code: bool = False


Block = Facts | Tiles | Table | Plot | Text


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its blocks; a closed section is collapsed at first."""

    title: str
    blocks: tuple[Block, ...]
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class VerdictLine:
    """The verdict on one run or comparison: level, word, opening sentence and reasons."""

    level: str
    word: str
    sentence: str
    reasons: tuple[str, ...] = ()
    label: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A report: the input of every renderer."""

    title: str
    subtitle: str
    verdicts: tuple[VerdictLine, ...]
    sections: tuple[Section, ...] = field(default=())

    @property
    def plots(self) -> tuple[Plot, ...]:
        """Every figure, in order."""
        return tuple(block for section in self.sections for block in section.blocks if isinstance(block, Plot))


def legible_report(report: Report) -> Report:
    """The report with every text legible, except the frames of figures, which must be legible already."""
    return Report(
        legible(report.title),
        legible(report.subtitle),
        tuple(_verdict(verdict) for verdict in report.verdicts),
        tuple(
            Section(legible(section.title), tuple(_block(block) for block in section.blocks), section.is_closed)
            for section in report.sections
        ),
    )


def _verdict(verdict: VerdictLine) -> VerdictLine:
    found: VerdictLine = legible_values(verdict)
    return found


def _block(block: Block) -> Block:
    match block:
        case Facts() | Tiles() | Text():
            found: Block = legible_values(block)
            return found
        case Table():
            return Table(legible(block.title), _frame(block.frame), legible(block.note))
        case Plot():
            title, caption, alt = (legible(text) for text in (block.title, block.caption, block.alt))
            return dataclasses.replace(block, name=file_name(block.name), title=title, caption=caption, alt=alt)


def _frame(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with its texts legible; columns of numbers do not change."""
    texts = {
        name: pd.Series([legible(each) if isinstance(each, str) else each for each in frame[name]], dtype=object)
        for name in frame.columns
        if not pd.api.types.is_numeric_dtype(frame[name])
    }
    legible_frame = frame.reset_index(drop=True).assign(**{str(name): column for name, column in texts.items()})
    return legible_frame.rename(columns={name: legible(str(name)) for name in legible_frame.columns})
