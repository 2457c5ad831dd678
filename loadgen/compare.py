"""`tgi-bench compare`: two server commands under one load, in pairs, and what is left for people and for CI."""

import argparse
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen import settings
from loadgen.config import BenchConfig
from loadgen.errors import UsageError
from loadgen.gate import Gate, Side, live_measure
from loadgen.present import render_table
from loadgen.progress import open_progress
from loadgen.runner import make_run_directory, new_run_id
from reports import ci
from reports.compare import LEAST_EFFECT, CompareOptions, Comparison, Requirement, direction_of
from reports.comparison_report import build_comparison_report, metrics_table, verdict_line
from reports.report import write_built
from reports.results import SCHEMA_VERSION, replace_file, write_json

COMPARISON_FILE = "comparison.json"
GITHUB = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")


def run(given: argparse.Namespace, arguments: Sequence[str]) -> tuple[str, int]:
    """Measure pairs until decided, and write the files; returns the text for stdout and the exit code."""
    load = settings.load(BenchConfig, vars(given), given.config)
    options = options_of(given)
    sides = (Side("a", given.label_a, given.server_a), Side("b", given.label_b, given.server_b))
    out: Path = given.out or Path("runs") / new_run_id()
    make_run_directory(out)
    if (out / COMPARISON_FILE).exists():
        raise UsageError(f"{out} holds a comparison already; give another --out or remove it")
    progress = open_progress()
    started_s = time.monotonic()
    try:
        result = Gate(out, options, progress, given.max_minutes).run(sides, live_measure(load, options, progress))
    finally:
        progress.close()
    comparison = result.comparison
    reproduce = ("tgi-bench " + shlex.join(arguments),)
    report = write_built(build_comparison_report(comparison, reproduce), out).html
    content = comparison_json(comparison)
    write_json(out / COMPARISON_FILE, content)
    if given.junit is not None:
        _write(given.junit, ci.junit(comparison, time.monotonic() - started_s))
    if given.md is not None:
        _write(given.md, ci.comment(comparison, reproduce).encode())
    annotations = ci.write_ci(comparison, ci_environment(settings.environment(*GITHUB)), reproduce)
    progress.say(f"report: {report}")
    if given.json:
        return json.dumps(content, indent=2, allow_nan=False), result.exit_code
    return "\n".join(filter(None, (render(comparison), annotations))), result.exit_code


def options_of(given: argparse.Namespace) -> CompareOptions:
    """The judgement that flags ask for. Raises UsageError naming the flag, its value and its limit."""
    for name, least in (("pairs", 2), ("min_pairs", 2), ("max_pairs", 2)):
        value = getattr(given, name)
        if value is not None and not least <= value <= 100:
            raise UsageError(f"`{name}` is {value} but must be {least} to 100")
    if given.min_pairs > given.max_pairs:
        raise UsageError(f"`min_pairs` is {given.min_pairs} but `max_pairs` is {given.max_pairs}")
    try:
        for text in given.require:
            direction_of(Requirement.parse(text).metric)
        for metric in given.gate or ():
            direction_of(metric)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except KeyError as error:
        raise UsageError(f"there is no metric {error}; names are such as ttft_p95_ms or output_tokens_per_s") from error
    options = CompareOptions()
    gated = tuple(dict.fromkeys((*options.gated, *(given.gate or ()))))
    return CompareOptions(
        gated=gated,
        shown=tuple(name for name in options.shown if name not in gated),
        min_effect=parse_share(given.min_effect),
        min_pairs=given.min_pairs,
        max_pairs=given.max_pairs,
        pairs=given.pairs,
        inconclusive=given.inconclusive,
        require=tuple(given.require),
    )


def ci_environment(variables: Mapping[str, str]) -> ci.CiEnvironment:
    """What GitHub's variables offer."""
    summary, output = (Path(variables[name]) if name in variables else None for name in GITHUB[1:])
    return ci.CiEnvironment(variables.get("GITHUB_ACTIONS") == "true", summary, output)


def parse_share(text: str) -> float:
    """A percentage as a share. Raises UsageError.

    >>> parse_share("5%"), parse_share("7.5")
    (0.05, 0.075)
    """
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not LEAST_EFFECT <= share <= 1:
        raise UsageError(f"`min_effect` is {text!r} but must be {LEAST_EFFECT:.0%} to 100%")
    return share


def render(comparison: Comparison) -> str:
    """The verdict and the table of metrics, as text."""
    line = verdict_line(comparison)
    parts = [f"{line.word}: {line.sentence}", *(f"  {reason}" for reason in line.reasons)]
    if comparison.metrics:
        parts += ["", render_table(metrics_table(comparison))]
    return "\n".join(parts)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain, finite values."""

    def finite(value: float | None) -> float | None:
        return value if value is not None and abs(value) < float("inf") else None

    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": str(comparison.verdict),
        "exit_code": comparison.exit_code,
        "pairs": comparison.num_pairs,
        "a": comparison.label_a,
        "b": comparison.label_b,
        "metrics": {
            metric.name: {
                "gated": metric.is_gated,
                "decision": str(metric.decision),
                "a": finite(metric.a),
                "b": finite(metric.b),
                "change": finite(metric.change.value),
                "change_lo": finite(metric.change.lo),
                "change_hi": finite(metric.change.hi),
                "change_unit": metric.change_unit,
                "smallest_effect": finite(metric.smallest_effect),
                "d": list(metric.d),
            }
            for metric in comparison.metrics
        },
        "requirements": [
            {"limit": str(result.requirement), "value": finite(result.value), "met": result.is_met}
            for result in comparison.requirements
        ],
        "refusals": [refusal.message for refusal in comparison.refusals],
        "notes": list(comparison.notes),
    }


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
