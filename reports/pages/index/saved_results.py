"""Finds the results below a folder: runs, series of runs, comparisons, studies and plans.

Only small files are read, and no run is measured again. An incomplete or unreadable folder is a result with a reason.
"""

import csv
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reports.document import Estimate, format_percent
from reports.gate.saved_comparison import COMPARISON_FILE, load_comparison
from reports.metrics.judged_objectives import NO_VALUE, named_statistic
from reports.metrics.requests.per_request import Direction
from reports.metrics.summary import metric_value
from reports.metrics.titles import better_direction, metric_heading
from reports.pages.comparison_page import metric_sentence
from reports.pages.sections.facts import load_sentence
from reports.pages.sections.latency_tables import scaled
from reports.pages.sweep_figures import LOAD_NAMES
from reports.run_schema import NOT_FAILED
from reports.run_store import MANIFEST_FILE, SUMMARY_FILE, RunDirectoryError, load_manifest, read_json

MAX_DEPTH = 4
"""Depth to which folders that are not a result are searched."""
MAX_JSON_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SavedResult:
    """One result: its folder, kind, verdict, load and key numbers.

    started: in UTC; the last change of its file if the start is not recorded. found: the result in one line.
    has_ttft_interval: false if the TTFT p95 is unsupported, because its run had too few requests.
    problem: why the folder could not be read; empty if it was read.
    """

    path: Path
    kind: str
    started: datetime.datetime
    label: str = ""
    verdict: str = ""
    load: str = ""
    output_tokens_per_s: float | None = None
    ttft_p95_ms: float | None = None
    has_ttft_interval: bool = True
    found: str = ""
    problem: str = ""

    @property
    def has_page(self) -> bool:
        return (self.path / "report.html").is_file()


def saved_results(root: Path) -> list[SavedResult]:
    """Every result below a folder, newest first. The folders inside a result are not searched."""
    return sorted(_below(root, 0), key=lambda each: (each.started, str(each.path)), reverse=True)


def _below(directory: Path, depth: int) -> Iterator[SavedResult]:
    for child in sorted(directory.iterdir()):
        if child.is_symlink() or not child.is_dir() or child.name.startswith(".") or child.name == "figures":
            continue
        known = read_result(child)
        if known is not None:
            yield known
            continue
        inner = list(_below(child, depth + 1)) if depth < MAX_DEPTH else []
        if inner:
            yield from inner
        else:
            yield SavedResult(child, "unknown", _changed(child), problem=NO_RESULT)


NO_RESULT = f"no {MANIFEST_FILE} or other result: nothing was measured, or it is another folder"


def read_result(directory: Path) -> SavedResult | None:
    """The result of one folder, from the first of the files in `KINDS`; None for a folder without such a file."""
    for name, kind, read in KINDS:
        if (directory / name).is_file():
            bare = SavedResult(directory, kind, _changed(directory / name))
            try:
                return read(bare)
            except RunDirectoryError as error:
                return replace(bare, problem=str(error))
            except OSError as error:
                return replace(bare, problem=f"{directory / name}: {error.strerror}")
            except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
                return replace(bare, problem=f"{directory / name}: not readable ({type(error).__name__}: {error})")
    return None


def _changed(path: Path) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)


def _run(bare: SavedResult) -> SavedResult:
    manifest = load_manifest(bare.path)
    known = replace(
        bare, started=_time(manifest.started_at, bare.started), label=manifest.label, load=load_sentence(manifest)
    )
    if not (bare.path / SUMMARY_FILE).is_file():
        problem = f"no {SUMMARY_FILE}: the run did not end; `tgi-bench report {bare.path}` reads its records"
        return replace(known, problem=problem)
    summary = _json(bare.path / SUMMARY_FILE)
    failed = sum(count for name, count in summary["counts"].items() if name not in NOT_FAILED)
    return replace(
        known,
        verdict=str(summary["verdict"]["status"]),
        output_tokens_per_s=summary["rates"]["output_tokens_per_s"]["value"],
        ttft_p95_ms=metric_value(summary, "ttft_p95_ms", manifest.is_open_loop),
        has_ttft_interval=_has_interval(summary, "ttft_p95_ms", manifest.is_open_loop),
        found=f"{failed:,} of {sum(summary['counts'].values()):,} requests failed",
    )


def _has_interval(summary: Mapping[str, Any], name: str, is_open_loop: bool) -> bool:
    """Whether a metric of a run is supported. A value without `needed` is not marked, as in runs of older versions."""
    found = named_statistic(summary, name, is_open_loop)
    return found is None or scaled({**NO_VALUE, **found[0]}, 1.0).is_supported


def _series(bare: SavedResult) -> SavedResult:
    """A sweep, a search or a matrix: numbers of the load with the most tokens/s within the objectives."""
    content = _json(bare.path / "sweep.json")
    facets = content.get("facets") or [content]
    points = [point for facet in facets for point in facet["points"]]
    unit = LOAD_NAMES[content["quantity"]]
    highest = content.get("highest_within")
    within = [point for point in points if point["load"] == highest] or points
    best = max(within, key=lambda point: point["metrics"]["output_tokens_per_s"] or 0.0)
    loads = sorted({point["load"] for point in points})
    is_valid = all(point["is_valid"] for point in points)
    setting = f", {len(facets)} values of {content['setting']}" if "facets" in content else ""
    return replace(
        _dated(bare, [bare.path / run for run in points[0]["runs"]]),
        kind="matrix" if setting else "search" if content.get("capacity") else "sweep",
        verdict="valid" if is_valid else "some points invalid",
        load=f"{loads[0]:g} to {loads[-1]:g} {unit}{setting}",
        output_tokens_per_s=best["metrics"]["output_tokens_per_s"],
        ttft_p95_ms=best["metrics"]["ttft_p95_ms"],
        has_ttft_interval="ttft_p95_ms" not in best.get("unsupported", ()),
        found=_capacity(content, unit) or f"at {best['load']:g} {unit}" + (", within objectives" if highest else ""),
    )


def _capacity(content: Mapping[str, Any], unit: str) -> str:
    """The capacity, such as `41.0 requests/s (38–43) within objectives`; empty if the sweep was not a search."""
    found = content.get("capacity")
    if not found or found["value"] is None:
        return ""
    value, lo, hi = (_count(found[name]) if unit == "users" else found[name] for name in ("value", "lo", "hi"))
    capacity = Estimate(value, lo, hi)
    interval = f" ({capacity.interval})" if capacity.interval else ""
    return f"{capacity.text} {unit}{interval} within objectives"


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _comparison(bare: SavedResult) -> SavedResult:
    saved = load_comparison(bare.path)
    comparison = saved.comparison
    deciding = [metric for metric in comparison.gated if metric.decision is comparison.verdict] or comparison.gated
    return replace(
        _dated(bare, (*saved.runs_a, *saved.runs_b)),
        label=f"{comparison.label_b} against {comparison.label_a}",
        verdict=str(comparison.verdict).replace("_", " "),
        found="not compared" if comparison.refusals else "; ".join(map(metric_sentence, deciding[:2])),
    )


def _noise(bare: SavedResult) -> SavedResult:
    content = _json(bare.path / "noise.json")
    parts = []
    for name, metric in content["metrics"].items():
        effects = {int(pairs): effect for pairs, effect in metric["smallest_effect"].items()}
        if metric["gated"] and effects:
            parts.append(f"{max(effects)} pairs find {format_percent(effects[max(effects)])} of {metric_heading(name)}")
    return replace(bare, label=str(content["side"]), verdict=f"{content['runs']} runs", found="; ".join(parts))


def _study(bare: SavedResult) -> SavedResult:
    path = bare.path / "verdict.json"
    if not path.is_file():
        return replace(bare, verdict="not finished", found="nothing is confirmed yet")
    verdict = _json(path)
    gain = verdict.get("gain")
    parts = [f"{verdict.get('trials', 0):,} launches"]
    if gain and None not in gain:
        metric = verdict.get("gain_of", verdict["objective"])
        if better_direction(metric) is Direction.LOWER:
            gain = (1 / gain[0], 1 / gain[2], 1 / gain[1])
        value, lo, hi = (100 * (each - 1) for each in gain)
        change = Estimate(value, lo, hi, is_change=True)
        parts.insert(0, f"{metric_heading(metric)} {change.text} % ({change.interval})")
    return replace(bare, verdict=_advice(verdict), found=", ".join(parts))


def _advice(verdict: Mapping[str, Any]) -> str:
    if verdict["winner"] is None:
        return "no result"
    if verdict["winner"] == 0:
        return "keep the defaults"
    return "change the settings" if verdict["confirmed"] else "not confirmed"


def _plan(bare: SavedResult) -> SavedResult:
    with (bare.path / "plan.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    rates = sorted({float(row["rate"]) for row in rows})
    largest = max((row for row in rows if float(row["rate"]) == rates[-1]), key=lambda row: -int(row["replicas"]))
    return replace(
        bare,
        verdict="predicted",
        load=f"{rates[0]:g} to {rates[-1]:g} requests/s",
        found=f"{largest['replicas']} replicas for {rates[-1]:g} requests/s",
    )


def _predictions(bare: SavedResult) -> SavedResult:
    return replace(bare, verdict="predicted")


KINDS: tuple[tuple[str, str, Callable[[SavedResult], SavedResult]], ...] = (
    (COMPARISON_FILE, "comparison", _comparison),
    ("sweep.json", "sweep", _series),
    ("study.json", "study", _study),
    ("noise.json", "noise", _noise),
    ("plan.csv", "plan", _plan),
    ("predictions.parquet", "predictions", _predictions),
    (MANIFEST_FILE, "run", _run),
)
"""The file that identifies each kind of result. The first match counts: a study also has a noise.json."""


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise RunDirectoryError(f"{path}: larger than the limit of {MAX_JSON_BYTES} bytes")
    return read_json(path)


def _dated(bare: SavedResult, runs: Sequence[Path]) -> SavedResult:
    """The result with the start and the load of its first readable run."""
    for directory in runs:
        try:
            manifest = load_manifest(directory)
        except (RunDirectoryError, OSError, TypeError):
            continue
        return replace(bare, started=_time(manifest.started_at, bare.started), load=load_sentence(manifest))
    return bare


def _time(text: str, default: datetime.datetime) -> datetime.datetime:
    """An ISO time in UTC; the default if the text is not an ISO time."""
    try:
        found = datetime.datetime.fromisoformat(text)
    except (ValueError, TypeError):
        return default
    return found.astimezone(datetime.UTC) if found.tzinfo else found.replace(tzinfo=datetime.UTC)
