"""`tgi-bench compare`: two sides under one load, in live pairs or stored runs; writes the report and CI files."""

import argparse
import dataclasses
import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.commands.comparison_args import check_contention, options_of, sides_of
from loadgen.commands.shared_flags import (
    SIDE,
    add_baselines_flag,
    add_docker_flag,
    add_gate_flag,
    add_history_flag,
    add_interleave_flag,
    add_minutes_flag,
    add_side_load_flags,
    load_config,
)
from loadgen.commands.stored_comparison import rebuild, render
from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import MeasurementError, UsageError
from loadgen.gate.interleaving import InterleavedSlices, check_interleaving
from loadgen.gate.live_runs import live_measure
from loadgen.gate.pairing import Gate, GateResult, SeparateRuns
from loadgen.gate.sides import SideSpec, describe_sides, open_side
from loadgen.gate.stored_sides import between_of, stored_runs
from loadgen.generator.forked_load import forked_loads
from loadgen.progress import ProgressDisplay, add_verbosity_flags, progress_of
from loadgen.redaction import redacted_argv
from loadgen.run_directory import make_run_directory, new_run_id
from loadgen.target.launched.process_memory import num_gpus
from loadgen.workloads.workload_files import check_files
from reports.gate.compare import metrics_needed
from reports.gate.comparison import CompareOptions, Comparison
from reports.gate.saved_comparison import COMPARISON_FILE, comparison_json
from reports.gate.side_run import GateRefusal
from reports.gate.stored import MIN_RUNS, judge_stored
from reports.pages import ci
from reports.run_store import replace_file, write_json
from reports.text import plain_text

GITHUB = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Sides, judgement and output; then every flag of a load."""
    parser.add_argument("sides", nargs="*", metavar="SIDE", help=f"A, the baseline, and B, the candidate. {SIDE}")
    parser.add_argument(
        "--server-a", metavar="COMMAND", help="Command that starts side A; the same as command:COMMAND."
    )
    parser.add_argument("--server-b", metavar="COMMAND", help="Command that starts side B.")
    parser.add_argument("--against", metavar="NAME", help="Side A is this stored baseline, and SIDE is B.")
    add_baselines_flag(parser)
    add_history_flag(parser)
    parser.add_argument("--args-a", metavar="WORDS", help="Added to the launcher of a git, image or TOML side A.")
    parser.add_argument("--args-b", metavar="WORDS", help="Added to the launcher of side B.")
    add_docker_flag(parser)
    parser.add_argument("--label-a", metavar="NAME", help="Name of side A in reports. Default: the side as given.")
    parser.add_argument("--label-b", metavar="NAME", help="Name of side B in reports. Default: the side as given.")
    parser.add_argument(
        "--no-relaunch", action="store_true", help="Accept a URL as a side: its server is not restarted for every run."
    )
    parser.add_argument("--pairs", type=int, metavar="N", help="Exactly N pairs. Default 4 to 12, until decided.")
    parser.add_argument(
        "--min-pairs", type=int, metavar="N", default=4, help="Pairs before the first decision. Default 4."
    )
    parser.add_argument("--max-pairs", type=int, metavar="N", default=12, help="Maximum number of pairs. Default 12.")
    add_interleave_flag(parser)
    parser.add_argument(
        "--equal-contention",
        action="store_true",
        help="Adjust changes to equal waiting for processors, for a machine that other work shares (Linux, servers "
        "launched here).",
    )
    add_minutes_flag(parser)
    parser.add_argument(
        "--min-effect", metavar="PERCENT", default="3%", help="Smallest change of interest, 3%% or more. Default 3%%."
    )
    add_gate_flag(parser)
    parser.add_argument(
        "--require", action="append", default=[], metavar="LIMIT", help='Limit on B: "ttft_p95_ms < 800"; repeatable.'
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="DIFFERENCE",
        help='Judge runs that differ in this, such as "model" or "workload hash"; repeatable, and in the report.',
    )
    parser.add_argument(
        "--inconclusive",
        choices=("report", "pass", "fail"),
        default="report",
        help="Exit code of an inconclusive comparison: 3, 0 or 1.",
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="Write the result to this file as JUnit XML.")
    parser.add_argument(
        "--md", type=Path, metavar="FILE", help="Write the result to this file as Markdown, for a comment."
    )
    parser.add_argument(
        "--metrics", type=Path, metavar="FILE", help="Write the result to this file as a metrics report of GitLab."
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="Directory of the comparison. Default runs/<id>.")
    parser.add_argument("--json", action="store_true", help="Print comparison.json instead of the table.")
    add_side_load_flags(parser)
    add_verbosity_flags(parser)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure until decided, write the files, and print the table."""
    if args.dry_run:
        load, _, sides = _checked(args)
        print(describe_sides(sides, load))
        return 0
    measured = measure_comparison(args, words, progress_of(args))
    comparison = measured.result.comparison
    annotations = ci.write_ci(comparison, ci_environment(parsing.environment(*GITHUB)), measured.reproduce)
    if args.json:
        print(json.dumps(measured.content, indent=2, allow_nan=False))
    else:
        print("\n".join(filter(None, (render(comparison), annotations))))
    return measured.result.exit_code


@dataclass(frozen=True, slots=True)
class MeasuredComparison:
    """A comparison with its stored form, its directory, and the commands that repeat it."""

    result: GateResult
    content: dict[str, Any]
    directory: Path
    reproduce: tuple[str, ...]


def _checked(args: argparse.Namespace) -> tuple[BenchConfig, CompareOptions, tuple[SideSpec, SideSpec]]:
    """Load, options and sides of a command line. Raises UsageError."""
    load = load_config(args)
    options, sides = options_of(args, load), sides_of(args)
    if not sides[1].is_stored:
        check_files(load)
    check_contention(args.equal_contention, sides)
    check_interleaving(args.interleave, sides, load, num_gpus())
    return load, options, sides


def measure_comparison(args: argparse.Namespace, words: Sequence[str], progress: ProgressDisplay) -> MeasuredComparison:
    """Measure until decided and write the files."""
    load, options, sides = _checked(args)
    for name in ("junit", "md", "metrics"):
        _check_writable(name, getattr(args, name))
    out: Path = args.out or Path("runs") / new_run_id()
    make_run_directory(out)
    if (out / COMPARISON_FILE).exists():
        raise UsageError(f"{out} already holds a comparison; choose another --out or remove it")
    started_s = time.monotonic()
    try:
        result = _judged(sides, load, options, args, out, progress)
    finally:
        progress.place(None)
    comparison = result.comparison
    reproduce = ("tgi-bench " + shlex.join(redacted_argv(words)),)
    directories = [[run.directory for run in runs if run.directory] for runs in (result.runs_a, result.runs_b)]
    content = comparison_json(comparison, reproduce, *directories)
    write_json(out / COMPARISON_FILE, content)
    report = rebuild(out, out, (directories[0], directories[1]))[1]
    if args.junit is not None:
        _write(args.junit, ci.junit(comparison, time.monotonic() - started_s))
    if args.md is not None:
        _write(args.md, ci.comment(comparison, reproduce).encode())
    if args.metrics is not None:
        _write(args.metrics, ci.gitlab_metrics(comparison).encode())
    progress.show(f"report: {report}")
    return MeasuredComparison(result, content, out, reproduce)


def _judged(
    specs: tuple[SideSpec, SideSpec],
    load: BenchConfig,
    options: CompareOptions,
    args: argparse.Namespace,
    out: Path,
    progress: ProgressDisplay,
) -> GateResult:
    gate = Gate(out, options, progress, args.max_minutes)
    metrics = metrics_needed(options)
    with ExitStack() as stack:
        try:
            if specs[0].is_stored:
                return _against_stored(specs, load, gate, args, stack)
            sides = tuple(open_side(spec, load, out, stack, progress) for spec in specs)
        except MeasurementError as error:
            progress.show(str(error))
            refusal = GateRefusal.of(f"a side could not be measured: {error}")
            labels = [plain_text(spec.label) for spec in specs]
            comparison = Comparison(labels[0], labels[1], 0, options, (), (), (refusal,))
            return GateResult(comparison, comparison.exit_code)
        if args.interleave:
            measure = live_measure(load, metrics, progress, stack.enter_context(forked_loads()))
            result = gate.run((sides[0], sides[1]), InterleavedSlices(args.interleave, measure, out, progress))
        else:
            measure = live_measure(load, metrics, progress)
            result = gate.run((sides[0], sides[1]), SeparateRuns(measure, out, progress))
    running = [spec.label for spec in specs if spec.kind == "url"]
    return _with_notes(result, [f"the server of {label} was not restarted for every run" for label in running])


def _against_stored(
    specs: tuple[SideSpec, SideSpec],
    load: BenchConfig,
    gate: Gate,
    args: argparse.Namespace,
    stack: ExitStack,
) -> GateResult:
    metrics = metrics_needed(gate.options)
    stored = stored_runs(specs[0], metrics, args.baselines)
    exit_code = None
    if specs[1].is_stored:
        runs = stored_runs(specs[1], metrics, args.baselines)
    else:
        side = open_side(specs[1], load, gate.out, stack, gate.progress)
        alone = gate.run_alone(side, gate.options.pairs or MIN_RUNS, live_measure(load, metrics, gate.progress))
        runs, exit_code = alone.runs, alone.exit_code
    between = between_of(args.history, stored, metrics)
    comparison = judge_stored(stored, runs, gate.options, between)
    return GateResult(comparison, exit_code if exit_code is not None else comparison.exit_code, stored, runs)


def _with_notes(result: GateResult, notes: Sequence[str]) -> GateResult:
    comparison = dataclasses.replace(result.comparison, notes=(*result.comparison.notes, *notes))
    return dataclasses.replace(result, comparison=comparison)


def ci_environment(variables: Mapping[str, str]) -> ci.CiEnvironment:
    """The files for output that GitHub's variables name."""
    summary, output = (Path(variables[name]) if name in variables else None for name in GITHUB[1:])
    return ci.CiEnvironment(variables.get("GITHUB_ACTIONS") == "true", summary, output)


def _check_writable(name: str, path: Path | None) -> None:
    """Create the folder of an output file before anything is measured. Raises UsageError."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"`{name}` is {str(path)!r}: {error.strerror}; give a path in another folder") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"`{name}` is {str(path)!r}, which cannot be written; give a path in another folder")


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
