"""Text from outside made inert and legible: what cannot be seen, or would reorder or restyle the rest, is spelled out.

Markup is the renderers' to escape; here are control characters (terminal escapes among them), lone surrogates, and the
invisible characters that override the direction of a text.
"""

import dataclasses
import re
from typing import Any

import pandas as pd

from reports.document import Block, Facts, Plot, Report, Section, Table, Text, Tiles, VerdictLine

# Controls but tab and line feed; marks, embeddings, overrides and isolates of direction; zero width; surrogates.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


def legible(text: str) -> str:
    """The text with each such character as its code in brackets.

    >>> legible("a\\x1b[31mb"), legible("\\ud83d\\ude00 \\udc00"), legible("\\u202egnp.exe")
    ('a⟨1B⟩[31mb', '😀 ⟨DC00⟩', '⟨202E⟩gnp.exe')
    """
    return UNSEEN.sub(lambda found: f"⟨{ord(found[0]):X}⟩", _paired(text))


def _paired(text: str) -> str:
    """Halves of one character that JSON brought apart, as that character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def legible_report(report: Report) -> Report:
    """The same report with every text legible; figures draw what they are given, so their frames must be already."""
    return Report(
        legible(report.title),
        legible(report.subtitle),
        tuple(_verdict(verdict) for verdict in report.verdicts),
        tuple(
            Section(legible(section.title), tuple(_block(block) for block in section.blocks), section.is_closed)
            for section in report.sections
        ),
    )


def legible_values(value: Any) -> Any:
    """Text anywhere in lists, tuples, mappings and dataclasses; all else as it is."""
    match value:
        case str():
            return legible(value) if type(value) is str else value
        case list() | tuple():
            return type(value)(legible_values(each) for each in value)
        case dict():
            return {legible_values(key): legible_values(each) for key, each in value.items()}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {each.name: legible_values(getattr(value, each.name)) for each in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        case _:
            return value


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
    """Columns of numbers stay as they are."""
    texts = {
        name: pd.Series([legible(each) if isinstance(each, str) else each for each in frame[name]], dtype=object)
        for name in frame.columns
        if not pd.api.types.is_numeric_dtype(frame[name])
    }
    told = frame.reset_index(drop=True).assign(**{str(name): column for name, column in texts.items()})
    return told.rename(columns={name: legible(str(name)) for name in told.columns})


def file_name(text: str) -> str:
    """A figure's name with nothing in it that a path or a URL reads otherwise.

    >>> file_name("server-../../x y"), file_name("history")
    ('server-.._.._x_y', 'history')
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:120]
