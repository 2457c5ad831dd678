"""A report as one self-contained HTML file: no external request, light and dark, wide and narrow.

A page has no script, except to copy a command and to sort a table.

Figures are inline SVG. Their colours become CSS variables. Their style attributes become presentation attributes, so
the content security policy allows a single style sheet, by its hash.
"""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from reports.document import Block, Estimate, Link, Plot, Report, Section, Table
from reports.plots.drawn_figures import Drawn
from reports.plots.figure import PALETTE
from reports.renderers.markdown import cell_text, is_numeric

SHORT_TEXT = 16
"""Longest text of a cell without a line break."""
LONG_TEXT = 48
"""Shortest text of a wide cell, less one."""


def render(report: Report, drawn: Mapping[str, Drawn]) -> bytes:
    """The report as UTF-8 HTML, with the figures of `draw_all`."""
    style = _resource("report.css")
    scripts = [_resource(name) for name, is_used in _scripts(report) if is_used]

    def svg(plot: Plot, width: str) -> Markup:
        figure = drawn[plot.name]
        return inline_svg(figure.wide_svg if width == "wide" else figure.narrow_svg, f"{plot.name}-{width}", plot.alt)

    return (
        _template()
        .render(
            report=report,
            svg=svg,
            sections=_anchored(report.sections),
            style=Markup(style),
            style_hash=_digest(style),
            scripts=[Markup(script) for script in scripts],
            script_hashes=[_digest(script) for script in scripts],
        )
        .encode()
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(columns=_columns, rows=_rows)
    environment.filters.update(breakable=_breakable, prose=_prose, unbroken_flags=_unbroken_flags)
    return environment.from_string(_resource("report.html.j2"))


def _scripts(report: Report) -> tuple[tuple[str, bool], ...]:
    """The scripts, and whether the report uses each."""
    return (("copy.js", report.has_copy), ("sort.js", report.has_sorting))


def _digest(text: str) -> str:
    """The hash by which the content security policy allows an inline style sheet or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@dataclass(frozen=True, slots=True)
class AnchoredSection:
    """A section with its anchor, and its blocks in groups of the same layout."""

    title: str
    anchor: str
    is_closed: bool
    groups: "list[Group]"


def _anchored(sections: Sequence[Section]) -> list[AnchoredSection]:
    """The sections with anchors from their titles; a repeated anchor has a number."""
    seen: Counter[str] = Counter()
    found = []
    for section in sections:
        anchor = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        seen[anchor] += 1
        numbered = anchor if seen[anchor] == 1 else f"{anchor}-{seen[anchor]}"
        found.append(AnchoredSection(section.title, numbered, section.is_closed, _grouped(section.blocks)))
    return found


def _breakable(text: str) -> Markup:
    """A name with possible line breaks after its underscores, and an address with one before its port.

    >>> str(_breakable("max_tokens")), str(_breakable("http://127.0.0.1:8080"))
    ('max_<wbr>tokens', 'http://127.0.0.1<wbr>:8080')
    """
    return Markup("<wbr>").join(re.split(r"(?<=_)|(?=:\d)", text))


def _unbroken_flags(text: str) -> Markup:
    """A command line in which a flag is not broken at its hyphens.

    >>> str(_unbroken_flags("serve --max-tokens 5 <a>"))
    'serve <span class="flag">--max-tokens</span> 5 &lt;a&gt;'
    """
    flag = Markup('<span class="flag">{}</span>')
    words = re.split(r"(?<!\S)(--?[A-Za-z][\w-]*)", text)
    return Markup("").join(flag.format(word) if index % 2 else word for index, word in enumerate(words))


def _nonbreaking_units(text: str) -> str:
    """The sentence with no-break spaces between numbers and units.

    >>> _nonbreaking_units("in 27.8 ms for 95 % of 264 requests").split(" ")
    ['in', '27.8\xa0ms', 'for', '95\xa0%', 'of', '264', 'requests']
    """
    return re.sub(r"(?<=\d) (?=(?:ms|s|min|GiB|points)\b|%)", "\N{NO-BREAK SPACE}", text)


def _prose(text: str) -> Markup:
    """A sentence with no-break units, and with code between backticks.

    >>> str(_prose("`run <a>` takes 3 s"))
    '<code>run &lt;a&gt;</code> takes 3\\xa0s'
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(_nonbreaking_units(text)))))


def _resource(name: str) -> str:
    return resources.files("reports.renderers").joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    is_numeric: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell. style: CSS classes: n for a number, doubtful for an unsupported number, short for unbroken text,
    long for a wide cell.

    key: the number by which the table is sorted; empty for a text.
    """

    text: str
    style: str
    interval: str = ""
    href: str = ""
    key: str = ""


def _columns(table: Table) -> list[Column]:
    """The columns. A header has a no-break space before its arrow."""
    names = [re.sub(r" (?=[↑↓→←])", "\N{NO-BREAK SPACE}", str(name)) for name in table.frame.columns]
    return [Column(name, is_numeric(table.frame[own])) for name, own in zip(names, table.frame.columns, strict=True)]


def _rows(table: Table) -> Iterator[list[Cell]]:
    columns = _columns(table)
    for row in table.frame.itertuples(index=False):
        yield [_cell(value, column) for value, column in zip(row, columns, strict=True)]


def _cell(value: Any, column: Column) -> Cell:
    if isinstance(value, Estimate) and value.value is not None:
        style = "n" if value.is_supported else "n doubtful"
        return Cell(value.text, style, value.interval, key=repr(float(value.value)))
    text = cell_text(value)
    style = (
        "n" if column.is_numeric else "short" if len(text) <= SHORT_TEXT else "long" if len(text) > LONG_TEXT else ""
    )
    is_number = isinstance(value, int | float) and value == value
    return Cell(text, style, "", value.href if isinstance(value, Link) else "", repr(float(value)) if is_number else "")


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks with one layout: half-width figures in a grid, all others in a stack."""

    kind: str
    blocks: list[Block]


def _grouped(blocks: Sequence[Block]) -> list[Group]:
    groups: list[Group] = []
    for block in blocks:
        kind = "grid" if isinstance(block, Plot) and not block.is_full_width else "stack"
        if not groups or groups[-1].kind != kind:
            groups.append(Group(kind, []))
        groups[-1].blocks.append(block)
    return groups


def inline_svg(svg: str, prefix: str, alt: str) -> Markup:
    """A saved figure for the page, with theme colours, an aria-label and unique ids, and without style attributes."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'\bstyle="([^"]*)"', lambda match: _attributes(match[1]), body)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", body)
    for name, colour in PALETTE.items():
        body = body.replace(colour, f"var(--{name})")
    body = body.replace("#ffffff", "none")
    label = Markup.escape(alt)
    body = re.sub(
        r'<svg ([^>]*?)(?:width="[^"]*"|height="[^"]*") ([^>]*?)(?:width="[^"]*"|height="[^"]*")', r"<svg \1\2", body
    )
    return Markup(body.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))


def _attributes(style: str) -> str:
    """The declarations of a style attribute as presentation attributes, without the font family."""
    pairs = (each.split(":", 1) for each in style.split(";") if ":" in each)
    declared = {name.strip(): value.strip() for name, value in pairs}
    shorthand = declared.pop("font", None)
    if shorthand is not None:
        size = re.search(r"([\d.]+)px", shorthand)
        declared["font-size"] = f"{size[1]}px" if size else "8px"
        declared |= {"font-weight": "bold"} if re.search(r"\b(bold|[6-9]00)\b", shorthand) else {}
    declared.pop("font-family", None)
    return " ".join(f'{name}="{value}"' for name, value in declared.items())
