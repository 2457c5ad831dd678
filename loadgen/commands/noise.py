"""`tgi-bench noise`: how much runs of one side differ, and the smallest change that the gate can detect.

With `--interleave` the side is compared with itself, which splits its noise into launch, drift within a pair and within
run.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from loadgen.commands.comparison_args import gated_options
from loadgen.commands.present import render_table
from loadgen.commands.shared_flags import (
    SIDE,
    add_docker_flag,
    add_gate_flag,
    add_interleave_flag,
    add_minutes_flag,
    add_side_load_flags,
    load_config,
)
from loadgen.errors import UsageError
from loadgen.gate.interleaving import InterleavedSlices, check_interleaving
from loadgen.gate.live_runs import live_measure
from loadgen.gate.pairing import Gate
from loadgen.gate.sides import check_docker, check_relaunch, describe_sides, open_side, read_side
from loadgen.generator.forked_load import forked_loads
from loadgen.program import COULD_NOT_MEASURE
from loadgen.progress import add_verbosity_flags, progress_of
from loadgen.redaction import redacted_argv
from loadgen.run_directory import make_run_directory, new_run_id
from loadgen.target.launched.process_memory import num_gpus
from loadgen.workloads.workload_files import check_files
from reports.gate.compare import metrics_needed
from reports.gate.noise import noise_json, noise_of, noise_sentence, noise_table
from reports.gate.noise_split import components_table, split_noise
from reports.pages.noise_page import build_noise_report
from reports.renderers.write import write_report
from reports.run_store import write_json

NOISE_FILE = "noise.json"
MAX_RUNS = 100


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("side", metavar="SIDE", help=SIDE)
    parser.add_argument("--args", dest="args_a", metavar="WORDS", help="Added to the launcher of a git or TOML side.")
    add_docker_flag(parser)
    parser.add_argument("--label", dest="label_a", metavar="NAME", help="Name of the side. Default: the side as given.")
    parser.add_argument(
        "--no-relaunch", action="store_true", help="Accept a URL: its server is not restarted for every run."
    )
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        default=6,
        help="Runs of the side. With --interleave: launches, two in each pair. Default 6.",
    )
    add_interleave_flag(parser)
    add_minutes_flag(parser)
    add_gate_flag(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="Directory of the runs. Default runs/<id>.")
    parser.add_argument("--json", action="store_true", help="Print noise.json instead of the table.")
    add_side_load_flags(parser)
    add_verbosity_flags(parser)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure, write `noise.json` and the report."""
    load = load_config(args)
    least = 2 if args.interleave is None else 4
    if not least <= args.runs <= MAX_RUNS:
        raise UsageError(f"`runs` is {args.runs} but must be {least} to {MAX_RUNS}")
    options = gated_options(args.gate)
    spec = read_side("a", args.side, args.label_a, args.args_a, args.docker_args)
    check_docker((spec,), args.docker_args)
    if spec.is_stored:
        raise UsageError(f"{args.side} is stored, but noise needs live runs; `compare` accepts stored sides")
    check_relaunch((spec,), args.no_relaunch)
    check_files(load)
    check_interleaving(args.interleave, (spec, replace(spec, letter="b")), load, num_gpus())
    if args.dry_run:
        print(describe_sides((spec,), load))
        return 0
    out: Path = args.out or Path("runs") / new_run_id()
    make_run_directory(out)
    if (out / NOISE_FILE).exists():
        raise UsageError(f"{out} already holds a noise measurement; choose another --out or remove it")
    progress = progress_of(args)
    try:
        with ExitStack() as stack:
            side = open_side(spec, load, out, stack, progress)
            gate = Gate(out, options, progress, args.max_minutes)
            metrics = metrics_needed(options)
            if args.interleave:
                measure = live_measure(load, metrics, progress, stack.enter_context(forked_loads()))
                slices = InterleavedSlices(args.interleave, measure, out, progress)
                measured = gate.run_equal(side, args.runs // 2, slices)
            else:
                measured = gate.run_alone(side, args.runs, live_measure(load, metrics, progress))
    finally:
        progress.place(None)
    splits = split_noise(measured.pairs, (*options.gated, *options.shown))
    found = noise_of(measured.runs, options, splits)
    content = noise_json(spec.label, measured.runs, found, splits)
    write_json(out / NOISE_FILE, content)
    reproduce = ("tgi-bench " + shlex.join(redacted_argv(words)),)
    report = build_noise_report(spec.label, measured.runs, found, options, splits, reproduce)
    progress.show(f"report: {write_report(report, out).html}")
    if args.json:
        print(json.dumps(content, indent=2, allow_nan=False))
    else:
        invalid = [f"invalid: {'; '.join(run.reasons)}" for run in measured.runs if run.status == "invalid"]
        kind = f"launches of {args.interleave} interleaved slices" if args.interleave else "runs"
        print(
            f"{spec.label}: {len(measured.runs)} {kind}, in {out}", "", render_table(noise_table(found)), "", sep="\n"
        )
        if splits:
            print("components, standard deviations in %:", render_table(components_table(splits)), "", sep="\n")
        print("\n".join(invalid or [noise_sentence(found, options)]))
    is_measured = measured.is_valid and len(measured.runs) > 1
    return measured.exit_code or (0 if is_measured else COULD_NOT_MEASURE)
