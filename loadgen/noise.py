"""`tgi-bench noise`: runs of one side, how much they differ, and the smallest effect that the gate can detect."""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

from loadgen import settings
from loadgen.compare import check_docker, check_relaunch, dry_run, gated_options
from loadgen.config import BenchConfig
from loadgen.errors import UsageError
from loadgen.gate import Gate, live_measure
from loadgen.present import render_table
from loadgen.program import COULD_NOT_MEASURE
from loadgen.progress import open_progress
from loadgen.runner import make_run_directory, new_run_id
from loadgen.sides import open_side, read_side
from reports.compare import metrics_needed
from reports.noise import noise_json, noise_of, noise_sentence, noise_table
from reports.results import write_json

NOISE_FILE = "noise.json"
MOST_RUNS = 100


def run(given: argparse.Namespace) -> tuple[str, int]:
    """Measure, and write `noise.json`; returns the text for stdout and the exit code."""
    load = settings.load(BenchConfig, vars(given), given.config)
    if not 2 <= given.runs <= MOST_RUNS:
        raise UsageError(f"`runs` is {given.runs} but must be 2 to {MOST_RUNS}")
    options = gated_options(given.gate)
    text = read_side("a", given.side, given.label_a, given.args_a, given.docker_args)
    check_docker((text,), given.docker_args)
    if text.is_stored:
        raise UsageError(f"{given.side} is stored, and noise is measured; `compare` takes stored sides")
    check_relaunch((text,), given.no_relaunch)
    if given.dry_run:
        return dry_run((text,), load), 0
    out: Path = given.out or Path("runs") / new_run_id()
    make_run_directory(out)
    if (out / NOISE_FILE).exists():
        raise UsageError(f"{out} holds a measurement of noise already; give another --out or remove it")
    progress = open_progress()
    try:
        with ExitStack() as held:
            side = open_side(text, load, out, held, progress)
            gate = Gate(out, options, progress, given.max_minutes)
            alone = gate.run_alone(side, given.runs, live_measure(load, metrics_needed(options), progress))
    finally:
        progress.close()
    found = noise_of(alone.runs, options)
    content = noise_json(text.label, alone.runs, found)
    write_json(out / NOISE_FILE, content)
    exit_code = alone.exit_code or (0 if alone.is_valid and len(alone.runs) > 1 else COULD_NOT_MEASURE)
    if given.json:
        return json.dumps(content, indent=2, allow_nan=False), exit_code
    lines = [f"{text.label}: {len(alone.runs)} runs, in {out}", "", render_table(noise_table(found))]
    invalid = [f"invalid: {'; '.join(run.reasons)}" for run in alone.runs if run.status == "invalid"]
    return "\n".join([*lines, "", *(invalid or [noise_sentence(found, options)])]), exit_code
