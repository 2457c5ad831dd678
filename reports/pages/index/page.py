"""The page of all results below a folder: verdict, load and key numbers of each, newest first."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from reports.document import Block, Estimate, Link, Report, Section, Table, VerdictLine
from reports.pages.index.saved_results import SavedResult

NOTE = (
    "Output tokens/s and TTFT p95 of a sweep or a search are those of its best load. A name links to the page of the "
    "result; `tgi-bench report DIR` writes a missing page. A click on a heading sorts the rows. ≥ marks an "
    "unsupported value: too few requests for a 95 % interval."
)


def build_index(root: Path, results: Sequence[SavedResult], out: Path | None = None) -> Report:
    """The index of a folder. Links are relative to `out`, which is the folder by default."""
    read = [each for each in results if not each.problem]
    broken = [each for each in results if each.problem]
    counts = Counter(each.kind for each in read)
    text = ", ".join(f"{count:,} {_plural(kind, count)}" for kind, count in counts.most_common()) or "no results"
    latest = f", the newest of {read[0].started:%Y-%m-%d %H:%M} UTC" if read else ""
    failed = f" {len(broken):,} {'folder' if len(broken) == 1 else 'folders'} could not be read." if broken else ""
    verdict = VerdictLine(
        "degraded" if broken else "valid", f"{len(read):,} results", f"{_start(text)}{latest}.{failed}"
    )
    blocks: list[Block] = [Table("", results_table(root, read, out or root), NOTE, is_sortable=True)] if read else []
    sections = [Section("Results", tuple(blocks))] if blocks else []
    if broken:
        sections.append(Section("Not read", (Table("", problems_table(root, broken)),)))
    return Report(f"Results in {root.resolve().name}", str(root), (verdict,), tuple(sections))


def _ttft(each: SavedResult) -> Estimate | float | None:
    """The TTFT p95 of a result; marked if it is unsupported."""
    if each.ttft_p95_ms is None or each.has_ttft_interval:
        return each.ttft_p95_ms
    return Estimate(each.ttft_p95_ms, is_supported=False, is_high=True)


def _start(text: str) -> str:
    return text[:1].upper() + text[1:]


def _plural(kind: str, count: int) -> str:
    one, many = PLURALS.get(kind, (kind, f"{kind}s"))
    return one if count == 1 else many


PLURALS = {
    "study": ("study", "studies"),
    "search": ("search", "searches"),
    "matrix": ("matrix", "matrices"),
    "noise": ("noise measurement", "noise measurements"),
    "predictions": ("set of predictions", "sets of predictions"),
}


def results_table(root: Path, results: Sequence[SavedResult], out: Path) -> pd.DataFrame:
    """A row for each readable result."""
    rows = [
        {
            "name": _name(root, each, out),
            "kind": each.kind,
            "verdict": each.verdict,
            "result": each.found,
            "load": each.load,
            "Output tokens/s ↑": each.output_tokens_per_s,
            "TTFT p95, ms ↓": _ttft(each),
            "started (UTC)": f"{each.started:%Y-%m-%d %H:%M}",
        }
        for each in results
    ]
    return pd.DataFrame(rows).astype(object)


def problems_table(root: Path, results: Sequence[SavedResult]) -> pd.DataFrame:
    """A row for each folder that could not be read."""
    return pd.DataFrame(
        {
            "folder": each.path.relative_to(root).as_posix(),
            "kind": each.kind,
            "changed (UTC)": f"{each.started:%Y-%m-%d %H:%M}",
            "reason": each.problem,
        }
        for each in results
    )


def results_json(root: Path, results: Sequence[SavedResult]) -> list[dict[str, Any]]:
    """The rows of the index for programs."""
    return [
        {
            "folder": each.path.relative_to(root).as_posix(),
            "kind": each.kind,
            "label": each.label,
            "started": each.started.isoformat(timespec="seconds"),
            "verdict": each.verdict,
            "load": each.load,
            "output_tokens_per_s": each.output_tokens_per_s,
            "ttft_p95_ms": each.ttft_p95_ms,
            "result": each.found,
            "problem": each.problem or None,
        }
        for each in results
    ]


def _name(root: Path, each: SavedResult, out: Path) -> Link | str:
    """The folder and its label; a link if the result has a page."""
    folder = each.path.relative_to(root)
    text = folder.as_posix() if each.label in ("", each.path.name) else f"{folder.as_posix()} · {each.label}"
    page = Path(os.path.relpath(each.path.absolute(), out.absolute())) / "report.html"
    return Link(text, quote(page.as_posix())) if each.has_page else text
