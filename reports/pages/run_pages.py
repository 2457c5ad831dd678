"""The pages of the runs of a series: each run has a page, with a link to the page of its series."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from reports.document import Link, Section, Table, format_duration
from reports.metrics.summary import Analysis, analyse_run
from reports.pages.run_page import build_run_report
from reports.pages.sections.latency_tables import UNSUPPORTED, scaled
from reports.pages.sections.objectives import marked_statistic
from reports.pages.sections.request_tables import failed_requests
from reports.renderers.write import write_page
from reports.run_store import MANIFEST_FILE, RunDirectoryError

PAGE = "report.html"
SERIES = {
    "sweep.json": "sweep",
    "comparison.json": "comparison",
    "study.json": "study",
    "noise.json": "noise measurement",
}
"""The file that identifies the folder of a series, and the kind of the series."""
MAX_LEVELS = 3
"""Folders between a series and its runs: the runs of a study are three folders below it."""


def write_run_page(analysis: Analysis) -> Path | None:
    """Write the page of a run of a series into the run's directory; None if the run was not kept."""
    directory = analysis.run.directory
    if directory is None:
        return None
    report = dataclasses.replace(build_run_report([analysis]), up=way_up(directory))
    return write_page(report, directory / PAGE)


def write_pages_below(directory: Path) -> Iterator[Path]:
    """Write the page of each run below the folder of a series; yields their paths. Skips runs that cannot be read."""
    for manifest in sorted(directory.rglob(MANIFEST_FILE)):
        try:
            page = write_run_page(analyse_run(manifest.parent))
        except RunDirectoryError:
            continue
        if page is not None:
            yield page


def way_up(directory: Path) -> Link | None:
    """The link from a run to the page of its series; None if it is in no series."""
    for level, folder in enumerate(directory.absolute().parents[:MAX_LEVELS], 1):
        kind = next((kind for name, kind in SERIES.items() if (folder / name).is_file()), None)
        if kind is not None:
            return Link(f"{kind} {folder.name}", "../" * level + PAGE)
    return None


def run_link(text: str, directory: Path | None) -> Link | str:
    """A link from the page of a series to the page of a run in its folder; only the text if the run has no page."""
    if directory is None or not (directory / PAGE).is_file():
        return text
    return Link(text, quote(f"{directory.name}/{PAGE}"))


def runs_section(runs: Iterable[tuple[str, Analysis]]) -> Section:
    """A row for each run of a series, with a link to its page."""
    rows = [
        {
            "run": run_link(name, analysis.run.directory),
            "window": format_duration(analysis.measured.window.length_s),
            "requests": sum(analysis.summary["counts"].values()),
            "failed ↓": failed_requests(analysis),
            "Output tokens/s ↑": scaled(analysis.summary["rates"]["output_tokens_per_s"], 1.0),
            "TTFT p95, ms ↓": marked_statistic(analysis, "ttft_p95_ms"),
            "measurement": analysis.summary["verdict"]["status"],
        }
        for name, analysis in runs
    ]
    return Section("Runs", (Table("", pd.DataFrame(rows), NOTE),), is_closed=True)


NOTE = f"A name links to the page of the run; `tgi-bench report DIR --runs` writes missing pages. {UNSUPPORTED}"
