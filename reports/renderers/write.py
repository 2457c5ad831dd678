"""Writes a report: `report.html`, `report.md`, its figures, and optionally CSV and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reports.document import Report, legible_report
from reports.plots.drawn_figures import Drawn, draw_all
from reports.renderers import csv, html, json, markdown
from reports.run_store import RunDirectoryError, replace_file


def write_figures(drawn: Mapping[str, Drawn], directory: Path) -> list[Path]:
    """Write each figure as PNG and SVG; returns the paths. Raises RunDirectoryError if the folder is a link."""
    if directory.is_symlink():
        raise RunDirectoryError(f"{directory} is a link, and figures are not written through a link; remove it")
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in drawn.items():
        for suffix, content in ((".png", figure.png), (".svg", figure.wide_svg.encode())):
            paths.append(directory / f"{name}{suffix}")
            replace_file(paths[-1], content)
    return paths


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """The files of a written report."""

    html: Path
    markdown: Path
    figures: tuple[Path, ...]
    others: tuple[Path, ...] = ()


def write_report(report: Report, out: Path, extra_formats: Sequence[str] = ()) -> ReportPaths:
    """Write `report.html`, `report.md`, every figure as PNG and SVG, and the extra formats (csv, json)."""
    out.mkdir(parents=True, exist_ok=True)
    report = legible_report(report)
    drawn = draw_all(report)
    paths = write_figures(drawn, out / "figures")
    replace_file(out / "report.html", html.render(report, drawn))
    replace_file(out / "report.md", markdown.render(report))
    others = []
    for name, renderer in (("csv", csv), ("json", json)):
        if name in extra_formats:
            replace_file(out / f"report.{name}", renderer.render(report))
            others.append(out / f"report.{name}")
    return ReportPaths(out / "report.html", out / "report.md", tuple(paths), tuple(others))


def write_page(report: Report, path: Path) -> Path:
    """Write the page only, without separate files of its figures; returns its path."""
    report = legible_report(report)
    replace_file(path, html.render(report, draw_all(report, has_png=False)))
    return path
