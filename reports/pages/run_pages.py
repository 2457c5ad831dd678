"""The pages of the runs of a series: each run has its own, with a link back to the page of its series."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from reports.document import Link
from reports.metrics.summary import Analysis, analyse_run
from reports.pages.run_page import build_run_report
from reports.renderers.write import write_page
from reports.run_store import MANIFEST_FILE, RunDirectoryError

PAGE = "report.html"
# The files that mark the folder of a series, with its kind. The runs of a study are three folders below it.
SERIES = {
    "sweep.json": "sweep",
    "comparison.json": "comparison",
    "study.json": "study",
    "noise.json": "noise measurement",
}
MAX_LEVELS = 3


def write_run_page(analysis: Analysis) -> Path | None:
    """Write the page of a run of a series into its own directory; None for a run that was not kept."""
    directory = analysis.run.directory
    if directory is None:
        return None
    report = dataclasses.replace(build_run_report([analysis]), up=way_up(directory))
    return write_page(report, directory / PAGE)


def write_pages_below(directory: Path) -> Iterator[Path]:
    """Write the page of each run below the folder of a series. Runs that cannot be read are skipped."""
    for manifest in sorted(directory.rglob(MANIFEST_FILE)):
        try:
            page = write_run_page(analyse_run(manifest.parent))
        except RunDirectoryError:
            continue
        if page is not None:
            yield page


def way_up(directory: Path) -> Link | None:
    """The link from a run to the page of the series that holds it."""
    for level, folder in enumerate(directory.absolute().parents[:MAX_LEVELS], 1):
        kind = next((kind for name, kind in SERIES.items() if (folder / name).is_file()), None)
        if kind is not None:
            return Link(f"{kind} {folder.name}", "../" * level + PAGE)
    return None


def run_link(text: str, directory: Path | None, page_directory: Path | None) -> Link | str:
    """A link from a page to the page of a run below its directory; the text alone if the run has no page."""
    if directory is None or page_directory is None or not (directory / PAGE).is_file():
        return text
    folder, base = directory.absolute(), page_directory.absolute()
    return Link(text, quote(f"{folder.relative_to(base).as_posix()}/{PAGE}")) if folder.is_relative_to(base) else text


def common_folder(analyses: Iterable[Analysis]) -> Path | None:
    """The folder that holds the directories of all runs; None if they are in different ones, or were not kept."""
    folders = {each.run.directory.parent if each.run.directory else None for each in analyses}
    return folders.pop() if len(folders) == 1 else None
