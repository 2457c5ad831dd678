"""`comparison.json`: a verdict with all its evidence, from which its report can be rendered again."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from reports.gate.comparison import CompareOptions, Comparison, MetricResult
from reports.gate.decide import GateDecision
from reports.gate.noise_split import NoiseSplit
from reports.gate.requirements import Requirement, RequirementResult
from reports.gate.side_run import GateRefusal, direction_of
from reports.run_store import SCHEMA_VERSION, RunDirectoryError
from reports.stats.estimators import Interval
from reports.text import plain_text

COMPARISON_FILE = "comparison.json"
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class SavedComparison:
    """A comparison, the command that made it, and the runs of each side inside its directory.

    outside: the paths of the other runs, as recorded.
    """

    comparison: Comparison
    reproduce: tuple[str, ...]
    runs_a: tuple[Path, ...]
    runs_b: tuple[Path, ...]
    outside: tuple[str, ...] = ()


def comparison_json(
    comparison: Comparison,
    reproduce: Sequence[str] = (),
    runs_a: Sequence[Path] = (),
    runs_b: Sequence[Path] = (),
) -> dict[str, Any]:
    """The content of `comparison.json`. An infinite or unknown number is null; runs are named by their paths."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": str(comparison.verdict),
        "exit_code": comparison.exit_code,
        "pairs": comparison.num_pairs,
        "stored_runs_of_a": comparison.runs_a if comparison.is_stored else None,
        "a": comparison.label_a,
        "b": comparison.label_b,
        "setting": comparison.setting,
        "slices": comparison.slices,
        "noise": [asdict(each) for each in comparison.noise],
        "metrics": {metric.name: _metric_json(metric) for metric in comparison.metrics},
        "requirements": [
            {"limit": str(result.requirement), "value": _finite(result.value), "met": result.is_met}
            for result in comparison.requirements
        ],
        "refusals": [refusal.message for refusal in comparison.refusals],
        "is_usage": any(refusal.is_usage for refusal in comparison.refusals),
        "notes": list(comparison.notes),
        "options": asdict(comparison.options) | {"allow": sorted(comparison.options.allow)},
        "runs": {"a": [str(path) for path in runs_a], "b": [str(path) for path in runs_b]},
        "command": list(reproduce),
    }


def _metric_json(metric: MetricResult) -> dict[str, Any]:
    mean = metric.mean
    return {
        "gated": metric.is_gated,
        "decision": str(metric.decision),
        "a": _finite(metric.a),
        "b": _finite(metric.b),
        "change": _finite(metric.change.value),
        "change_lo": _finite(metric.change.lo),
        "change_hi": _finite(metric.change.hi),
        "change_unit": metric.change_unit,
        "smallest_effect": _finite(metric.smallest_effect),
        "limit": metric.limit,
        "mean_d": [_finite(mean.value), _finite(mean.lo), _finite(mean.hi)],
        "d": list(metric.d),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def load_comparison(directory: Path) -> SavedComparison:
    """The saved comparison of a directory. Raises RunDirectoryError."""
    path = directory / COMPARISON_FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RunDirectoryError(f"{path}: larger than the limit of {MAX_BYTES} bytes")
        content = json.loads(path.read_bytes())
        if content["schema_version"] > SCHEMA_VERSION:
            raise RunDirectoryError(
                f"{path}: has schema {content['schema_version']} but this version reads up to {SCHEMA_VERSION}; "
                "update tgi-bench"
            )
        names = {side: [str(name) for name in content["runs"][side]] for side in "ab"}
        paths = {side: [_run_inside(directory, name) for name in names[side]] for side in "ab"}
        outside = [name for side in "ab" for name, found in zip(names[side], paths[side], strict=True) if found is None]
        runs_a, runs_b = (tuple(found for found in paths[side] if found is not None) for side in "ab")
        words = tuple(map(str, content["command"]))
        return SavedComparison(_comparison(content), words, runs_a, runs_b, tuple(outside))
    except OSError as error:
        raise RunDirectoryError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunDirectoryError(f"{path}: not a readable comparison ({type(error).__name__}: {error})") from error


def _run_inside(directory: Path, name: str) -> Path | None:
    """The run of this name or recorded path in the comparison's directory; None if it is not there.

    The file may come from another machine, so no file outside its directory is read, not even through a link.
    """
    inside, found = directory.resolve(), (directory / Path(name).name).resolve()
    return found if found.is_dir() and found != inside and found.is_relative_to(inside) else None


def _comparison(content: dict[str, Any]) -> Comparison:
    known = {each.name for each in fields(CompareOptions)}
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in content["options"].items()
        if name in known
    }
    stored_runs_of_a = content["stored_runs_of_a"]
    return Comparison(
        label_a=plain_text(content["a"]),
        label_b=plain_text(content["b"]),
        num_pairs=int(content["pairs"]),
        options=CompareOptions(**options | {"allow": frozenset(options["allow"])}),
        metrics=tuple(_metric(name, each) for name, each in content["metrics"].items()),
        requirements=tuple(
            RequirementResult(Requirement.parse(each["limit"]), each["value"]) for each in content["requirements"]
        ),
        refusals=tuple(GateRefusal.of(message, is_usage=bool(content["is_usage"])) for message in content["refusals"]),
        notes=tuple(map(plain_text, content["notes"])),
        runs_a=int(content["pairs"] if stored_runs_of_a is None else stored_runs_of_a),
        is_stored=stored_runs_of_a is not None,
        setting=plain_text(content["setting"]),
        slices=int(content.get("slices", 1)),
        noise=tuple(NoiseSplit(**each) for each in content.get("noise", ())),
    )


def _metric(name: str, content: dict[str, Any]) -> MetricResult:
    smallest = content["smallest_effect"]
    return MetricResult(
        name=name,
        direction=direction_of(name),
        is_gated=bool(content["gated"]),
        a=content["a"],
        b=content["b"],
        d=tuple(map(float, content["d"])),
        mean=_interval(*content["mean_d"]),
        decision=GateDecision(content["decision"]),
        limit=float(content["limit"]),
        smallest_effect=math.inf if smallest is None else float(smallest),
    )


def _interval(value: float | None, lo: float | None, hi: float | None) -> Interval:
    """The inverse of `_finite`: a null bound is infinite, and all three are NaN if the value is null."""
    if value is None:
        return Interval(math.nan, math.nan, math.nan)
    return Interval(value, -math.inf if lo is None else lo, math.inf if hi is None else hi)
