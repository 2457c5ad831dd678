"""The report of a sweep over two settings: a table, a panel for each value, and the front of speed and throughput."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from reports.document import Block, Plot, Report, Section, Table, Text, VerdictLine, format_number
from reports.metrics.front import front
from reports.metrics.sweep import LoadPoint, Sweep
from reports.pages.best_by_load import NOTE, best_by_load, best_sentence, best_table
from reports.pages.sections.facts import start_time
from reports.pages.sweep_figures import LOAD_NAMES
from reports.pages.sweep_page import INTERVALS_NOTE, linked_points, point_label, points_table, sweep_json, verdict
from reports.plots import matrix_plots

FRONT = (
    "Tokens/s per user: 1000 / TPOT p50, the decode speed of one request. A point is on its line if no other load of "
    "the same value is higher in both; other points are hollow. Numbers are loads."
)
PANELS = (
    ("output_tokens_per_s", "Throughput", "output tokens/s ↑"),
    ("ttft_p95_ms", "TTFT p95", "ms ↓"),
)


@dataclass(frozen=True, slots=True)
class MatrixResult:
    """A sweep over loads for each value of `setting`, in their order.

    reused: points of an earlier command.
    is_of_server: the setting is the server's, so one value can be better than another. Other settings change the load.
    """

    setting: str
    facets: tuple[tuple[str, Sweep], ...]
    command: tuple[str, ...] = ()
    reused: int = 0
    is_of_server: bool = False

    @property
    def first(self) -> Sweep:
        return self.facets[0][1]


def build_matrix_report(result: MatrixResult) -> Report:
    """The report of all points."""
    manifest = result.first.points[0].first.run.manifest
    model = manifest.model or "unknown model"
    unit = LOAD_NAMES[result.first.quantity]
    loads = f"{len(result.first.points)} loads in {unit}, {len(result.facets)} values of {result.setting}"
    plots = _plots(result)
    table = Table("", matrix_table(result, has_links=True), _note(result))
    best = Table("Best value at each load", best_table(best_by_load(result.facets), result.setting, unit), NOTE)
    sections = [Section("Summary", (*plots[:1], *((best,) if result.is_of_server else ()), table, *plots[1:]))]
    if result.command:
        sections.append(Section("Reproduce", (Text(shlex.join(result.command), is_code=True),)))
    title = point_label(result.first) or f"Sweep over {result.first.quantity} and {result.setting}"
    subtitle = " · ".join((str(model), loads, start_time(manifest)))
    return Report(str(title), subtitle, (matrix_verdict(result),), tuple(sections))


def matrix_verdict(result: MatrixResult) -> VerdictLine:
    """The best value of a server's setting, the highest throughput of each value, and every invalid point."""
    unit = LOAD_NAMES[result.first.quantity]
    best_values = best_by_load(result.facets) if result.is_of_server else []
    sentences, reasons = [best_sentence(best_values, result.setting, unit)], []
    for value, sweep in result.facets:
        best = max(sweep.points, key=lambda point: point.value("output_tokens_per_s") or 0.0)
        speed = format_number(best.value("output_tokens_per_s") or 0.0)
        sentences.append(f"{result.setting} {value}: at most {speed} output tokens/s, at {best.load:g} {unit}.")
        reasons += [f"{result.setting} {value}, {reason}" for reason in verdict(sweep).reasons]
    words = "Some points are not valid measurements" if reasons else "Valid measurements"
    return VerdictLine("invalid" if reasons else "valid", words, " ".join(filter(None, sentences)), tuple(reasons))


def matrix_table(result: MatrixResult, *, has_links: bool = False) -> pd.DataFrame:
    """A row per point: the value, the columns of a sweep, the speed of one user, and whether it is on its front.

    has_links: a load links to the page of its run.
    """
    marks = matrix_frame(result)
    tables = []
    for value, sweep in result.facets:
        table = linked_points(sweep) if has_links else points_table(sweep)
        own = marks[marks["facet"] == value].set_index("load")
        table.insert(0, result.setting, value)
        speeds = [own["user_tokens_per_s"].get(point.load) for point in sweep.points]
        table.insert(3, "tokens/s per user ↑", speeds)
        table["front"] = ["yes" if own["is_front"].get(point.load) else "" for point in sweep.points]
        tables.append(table.drop(columns="Requests/s ↑"))
    found = pd.concat(tables, ignore_index=True)
    # A sweep has the column only if one of its points is invalid.
    return found.fillna({"measurement": "valid"}) if "measurement" in found else found


def matrix_frame(result: MatrixResult) -> pd.DataFrame:
    """A row per point: facet, load, output_tokens_per_s, user_tokens_per_s, ttft_p95_ms, is_valid, is_front."""
    rows: list[dict[str, Any]] = []
    for value, sweep in result.facets:
        points = [_speeds(point) for point in sweep.points]
        known = [index for index, each in enumerate(points) if each is not None]
        on_front = dict(zip(known, front([each for each in points if each is not None]), strict=True))
        for index, point in enumerate(sweep.points):
            total, own = points[index] or (point.value("output_tokens_per_s"), None)
            rows.append(
                {
                    "facet": value,
                    "load": point.load,
                    "output_tokens_per_s": total,
                    "user_tokens_per_s": own,
                    "ttft_p95_ms": point.value("ttft_p95_ms"),
                    "is_valid": point.is_valid,
                    "is_front": on_front.get(index, False),
                }
            )
    return pd.DataFrame(rows)


def matrix_json(result: MatrixResult) -> dict[str, Any]:
    """The content of `sweep.json` of a matrix."""
    frame = matrix_frame(result)
    ahead = frame[frame["is_front"]][["facet", "load", "output_tokens_per_s", "user_tokens_per_s"]]
    return {
        "quantity": result.first.quantity,
        "setting": result.setting,
        "reused": result.reused,
        "facets": [{"value": value, **sweep_json(sweep)} for value, sweep in result.facets],
        "front": ahead.rename(columns={"facet": "value"}).to_dict("records"),
    }


def _speeds(point: LoadPoint) -> tuple[float, float] | None:
    """Tokens/s in total and of one user; None for a point that is invalid or has no TPOT."""
    total, tpot_ms = point.value("output_tokens_per_s"), point.value("tpot_p50_ms")
    return (total, 1e3 / tpot_ms) if point.is_valid and total and tpot_ms else None


def _note(result: MatrixResult) -> str:
    count = sum(len(sweep.points) for _, sweep in result.facets)
    reused = f" {result.reused} of them were measured by an earlier command." if result.reused else ""
    linked = "each in its own directory; a load links to the page of its run"
    return f"{count} runs, {linked}.{reused} {INTERVALS_NOTE}"


def _plots(result: MatrixResult) -> tuple[Block, ...]:
    frame, unit = matrix_frame(result), LOAD_NAMES[result.first.quantity]
    height = max(1.0, 0.5 * len(result.facets))
    panels = tuple(
        Plot(
            column,
            f"{title}, a panel for each {result.setting}",
            f"{title} against {unit}. Hollow dots: not a valid measurement.",
            f"Line charts of {title} against {unit}: {_ranges(frame, column)}.",
            partial(matrix_plots.facets, frame, column, label, unit),
            height=height,
        )
        for column, title, label in PANELS
        if frame[column].notna().any()
    )
    known = frame[frame["user_tokens_per_s"].notna()]
    if not len(known):
        return panels
    alt = f"Chart of tokens/s per user against output tokens/s in total, a line for each {result.setting}."
    chart = Plot(
        "front",
        "Speed of a user against throughput",
        f"{FRONT} Colours: {result.setting}.",
        alt,
        lambda size: matrix_plots.speed_front(known, size),
        is_full_width=True,
    )
    return (chart, *panels)


def _ranges(frame: pd.DataFrame, column: str) -> str:
    """`128: 40 to 300; 1024: 20 to 90`."""
    parts: Sequence[str] = [
        f"{value}: {format_number(rows[column].min())} to {format_number(rows[column].max())}"
        for value, rows in frame.dropna(subset=[column]).groupby("facet", sort=False)
    ]
    return "; ".join(parts)
