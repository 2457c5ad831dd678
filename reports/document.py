"""A report as data: ordered sections of facts, tables, figures and text, which the renderers turn into bytes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from reports.plots import Size

MISSING = "–"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number in a table with its interval; an unsupported one is shown as doubtful, a change with its sign."""

    value: float | None
    lo: float | None = None
    hi: float | None = None
    is_supported: bool = True
    is_change: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.interval})" if self.interval else self.text

    @property
    def text(self) -> str:
        """The value alone, marked ~ where doubtful."""
        if self.value is None:
            return MISSING
        return ("" if self.is_supported else "~") + self._number(self.value)

    @property
    def interval(self) -> str:
        """`12.1–13.4`, of a change `-1.20 to +3.40`, or nothing where there is no interval."""
        if self.value is None or self.lo is None or self.hi is None:
            return ""
        return f"{self._number(self.lo)}{' to ' if self.is_change else '–'}{self._number(self.hi)}"

    def _number(self, value: float) -> str:
        return ("+" if self.is_change and value > 0 else "") + format_number(value)


def format_number(value: float) -> str:
    """An integer whole; anything else with three significant digits below a thousand and whole above.

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
    """Names and values, in groups that stand side by side."""

    groups: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """A few headline numbers: title, value, unit with the mark of its better direction."""

    tiles: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A frame of text, numbers and `Estimate`s; the first column names the row."""

    title: str
    frame: "pd.DataFrame"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure that `draw` makes in a given size; `name` is its file name, `height` a factor on the usual one."""

    name: str
    title: str
    caption: str
    alt: str
    draw: "Callable[[Size], Figure]"
    is_full_width: bool = False
    height: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `code` sets it as a command line."""

    text: str
    is_code: bool = False


Block = Facts | Tiles | Table | Plot | Text


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it; a closed one is folded away until asked for."""

    title: str
    blocks: tuple[Block, ...]
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class VerdictLine:
    """One run's (or comparison's) verdict: its level, the sentence that opens the report, and the reasons."""

    level: str
    word: str
    sentence: str
    reasons: tuple[str, ...] = ()
    label: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What all renderers render."""

    title: str
    subtitle: str
    verdicts: tuple[VerdictLine, ...]
    sections: tuple[Section, ...] = field(default=())

    @property
    def plots(self) -> tuple[Plot, ...]:
        """Every figure, in order."""
        return tuple(block for section in self.sections for block in section.blocks if isinstance(block, Plot))
