"""A report as data: sections of facts, tables, figures and text, which the renderers turn into bytes."""

import dataclasses
import math
from collections import Counter
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
class Link:
    """Text that links to another page; `href` is a relative, quoted address."""

    text: str
    href: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number in a table with its interval. A change has a sign.

    An unsupported number has a mark instead of an interval: ≥ for a lower bound or for a high percentile of a short
    run, ~ for any other number.
    needed: number of requests at this load for an interval, or for an interval narrower than the value.
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
        """The value without its interval; marked if it is unsupported."""
        if self.value is None:
            return MISSING
        return ("" if self.is_supported else "≥" if self.is_high else "~") + self._number(self.value)

    @property
    def even_text(self) -> str:
        """The value with its interval, both with the same decimals; a value that would become 0 keeps its digits."""
        decimals = None if self.lo is None or self.hi is None else bound_decimals(self.lo, self.hi)
        if self.value is None or decimals is None or not self.is_supported or round(self.value, decimals) == 0:
            return str(self)
        return f"{signed(_rounded(self.value, decimals), self.is_change)} ({self.interval})"

    @property
    def interval(self) -> str:
        """The interval as `12.1–13.4`, of a change as `-1.20 to +3.40`; `needs 9,000`; or an empty text."""
        needs = [] if self.needed is None or self.value is None else [f"needs {about(self.needed):,}"]
        if self.value is None or self.lo is None or self.hi is None or not self.is_supported:
            return "".join(needs)
        if math.isnan(self.lo) and math.isnan(self.hi):
            return ""
        lo, hi = (signed(text, self.is_change) for text in format_bounds(self.lo, self.hi))
        return ", ".join([f"{lo}{' to ' if self.is_change or '−' in lo + hi else '–'}{hi}", *needs])

    def _number(self, value: float) -> str:
        """The value; a change with an interval has as many decimals as its bounds."""
        decimals = None if self.lo is None or self.hi is None else bound_decimals(self.lo, self.hi)
        if decimals is None or not self.is_change or not self.is_supported:
            return signed(format_number(value), self.is_change)
        return signed(_rounded(value, decimals), is_change=True)


def signed(text: str, is_change: bool) -> str:
    """The number with a plus sign if it is a change above zero."""
    return f"+{text}" if is_change and text[:1].isdigit() and text.strip("0.") else text


def format_bounds(lo: float, hi: float) -> tuple[str, str]:
    """The ends of an interval with two significant digits of its width, and at most five; of counts, all digits.

    >>> format_bounds(38, 43), format_bounds(38.0, 43.0), format_bounds(12.1232, 12.12318)
    (('38', '43'), ('38.0', '43.0'), ('12.123', '12.123'))
    >>> format_bounds(623.71, 686.02), format_bounds(-11.93, 6.31), format_bounds(17.13, 18.94), format_bounds(7, 7)
    (('624', '686'), ('−12', '6'), ('17.1', '18.9'), ('7', '7'))
    """
    decimals = bound_decimals(lo, hi)
    if decimals is None:
        return format_number(lo), format_number(hi)
    return _rounded(lo, decimals), _rounded(hi, decimals)


def bound_decimals(lo: float, hi: float) -> int | None:
    """The decimals of the ends of an interval; None for counts, and for an interval without a finite width."""
    width = abs(hi - lo)
    if width == 0 or not math.isfinite(width) or (isinstance(lo, int) and isinstance(hi, int)):
        return None
    wanted, most = 1 - math.floor(math.log10(width)), 4 - math.floor(math.log10(max(abs(lo), abs(hi))))
    return max(0, min(wanted, most))


def _rounded(value: float, decimals: int) -> str:
    """The number with these decimals; a number that rounds to zero has no sign."""
    return _true_minus(f"{round(value, decimals) + 0.0:,.{decimals}f}")


def _true_minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")


def about(count: int) -> int:
    """A number of requests with two significant digits.

    >>> [about(count) for count in (6, 72, 368, 8_951, 123_456)]
    [6, 72, 370, 9000, 120000]
    """
    return int(float(f"{count:.1e}"))


def format_number(value: float) -> str:
    """An integer with all digits; a float with three significant digits below 1,000 and without decimals above.

    >>> [format_number(x) for x in (0.01234, 1.0, 12.345, 999.6, 12345.6, 0.0, 12345, 7, -2.5)]
    ['0.0123', '1.00', '12.3', '1,000', '12,346', '0', '12,345', '7', '−2.50']
    """
    if isinstance(value, int):
        return _true_minus(f"{value:,}")
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    return _true_minus(f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}")


def format_duration(seconds: float) -> str:
    """Seconds below a minute, else minutes and seconds, or hours and minutes.

    >>> [format_duration(x) for x in (0.5, 27.84, 60, 259.6, 3_661, 7_200)]
    ['0.500 s', '27.8 s', '1 min', '4 min 20 s', '1 h 1 min', '2 h']
    """
    if seconds < 59.95:
        return f"{format_number(float(seconds))} s"
    whole = round(seconds)
    parts = ((whole // 3600, "h"), (whole // 60 % 60, "min"), (whole % 60 if whole < 3600 else 0, "s"))
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


def format_percent(fraction: float) -> str:
    """A fraction in percent with one decimal; a fraction very near 0 or 1 is shown as a bound.

    >>> [format_percent(x) for x in (0.0, 0.0002, 0.0097, 0.5, 0.9999, 1.0)]
    ['0 %', '< 0.1 %', '1.0 %', '50.0 %', '> 99.9 %', '100 %']
    """
    if fraction in (0.0, 1.0):
        return f"{100 * fraction:.0f} %"
    if fraction < 0.001:
        return "< 0.1 %"
    return "> 99.9 %" if fraction > 0.999 else f"{100 * fraction:.1f} %"


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values in groups, which are laid out side by side."""

    groups: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline number. `unit` ends with the arrow of the better direction; `details` are lines below the number."""

    title: str
    value: str
    unit: str = ""
    details: tuple[str, ...] = ()
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class Tiles:
    """Headline numbers in a row."""

    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A frame of text, numbers, `Estimate`s and `Link`s; the first column contains the row names.

    In a page, a click on a column of a sortable table sorts its rows.
    """

    title: str
    frame: pd.DataFrame
    note: str = ""
    is_sortable: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure, which `draw` draws in a given size. `name` is its file name; `height` scales the default height."""

    name: str
    title: str
    caption: str
    alt: str
    draw: "Callable[[Size], Figure]"
    is_full_width: bool = False
    height: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. `is_code` marks a command line; `has_copy` adds a button that copies it."""

    text: str
    is_code: bool = False
    has_copy: bool = False


Block = Facts | Tiles | Table | Plot | Text


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its blocks; a closed section is initially collapsed."""

    title: str
    blocks: tuple[Block, ...]
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class VerdictLine:
    """The verdict on one run or comparison: level, word, sentence and reasons."""

    level: str
    word: str
    sentence: str
    reasons: tuple[str, ...] = ()
    label: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A report: the input of every renderer. `up` links to the page of the series or folder that contains it."""

    title: str
    subtitle: str
    verdicts: tuple[VerdictLine, ...]
    sections: tuple[Section, ...] = field(default=())
    up: Link | None = None

    @property
    def plots(self) -> tuple[Plot, ...]:
        """Every figure, in order."""
        return tuple(block for section in self.sections for block in section.blocks if isinstance(block, Plot))

    @property
    def has_copy(self) -> bool:
        """Whether a command of the report has a button that copies it."""
        return any(isinstance(each, Text) and each.has_copy for section in self.sections for each in section.blocks)

    @property
    def has_sorting(self) -> bool:
        """Whether a table of the report can be sorted."""
        return any(isinstance(each, Table) and each.is_sortable for section in self.sections for each in section.blocks)


def legible_report(report: Report) -> Report:
    """The report with all texts made legible, except the frames of figures: their texts must be legible before.

    Figures with equal names are numbered, because files and anchors have these names.
    """
    names: Counter[str] = Counter()
    return Report(
        legible(report.title),
        legible(report.subtitle),
        tuple(_verdict(verdict) for verdict in report.verdicts),
        tuple(
            Section(legible(section.title), tuple(_block(block, names) for block in section.blocks), section.is_closed)
            for section in report.sections
        ),
        legible_values(report.up),
    )


def _verdict(verdict: VerdictLine) -> VerdictLine:
    found: VerdictLine = legible_values(verdict)
    return found


def _block(block: Block, names: Counter[str]) -> Block:
    match block:
        case Facts() | Tiles() | Text():
            found: Block = legible_values(block)
            return found
        case Table():
            return Table(legible(block.title), _frame(block.frame), legible(block.note), block.is_sortable)
        case Plot():
            title, caption, alt = (legible(text) for text in (block.title, block.caption, block.alt))
            name = file_name(block.name)
            names[name] += 1
            name += f"-{names[name]}" if names[name] > 1 else ""
            return dataclasses.replace(block, name=name, title=title, caption=caption, alt=alt)


def _frame(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with all texts made legible; columns of numbers do not change."""
    texts = {
        name: pd.Series([legible_values(each) for each in frame[name]], dtype=object)
        for name in frame.columns
        if not pd.api.types.is_numeric_dtype(frame[name])
    }
    legible_frame = frame.reset_index(drop=True).assign(**{str(name): column for name, column in texts.items()})
    return legible_frame.rename(columns={name: legible(str(name)) for name in legible_frame.columns})
