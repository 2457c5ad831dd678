"""Check the engine on this machine's device, then time its steps.

    python -m reference_server.model_server.measure --presets llama-3.2-1b,llama-3.1-8b --minutes 9 --out result.json

Order: ceilings, correctness, kernels; for each preset the step (level S), the engine (level E) and Transformers'
continuous batching on the same shapes. The result file is written after every part, so that an interrupted run keeps
its results. Needs only torch, transformers, numpy and safetensors. Without a GPU it measures the CPU; use `--quick`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from reference_server.model_server.device import choose_device, make_current
from reference_server.model_server.measure import correctness, kernels, peer
from reference_server.model_server.measure.levels import measure_engine, measure_steps
from reference_server.model_server.measure.record import MeasurePlan, Record
from reference_server.model_server.measure.rig import Rig
from reference_server.model_server.measure.table import render

# The peer loads its own model first.
MIN_PEER_S = 45.0
DEFAULT_PRESETS = "llama-3.2-1b,llama-3.1-8b,bloom-560m"


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; returns 0, or 1 if a check or a part failed."""
    parser = argparse.ArgumentParser(prog="python -m reference_server.model_server.measure", description=__doc__)
    parser.add_argument("--presets", default=DEFAULT_PRESETS, help="names of built-in models, in this order")
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes after which no further part starts")
    parser.add_argument("--out", type=Path, help="JSON file, written after every part")
    parser.add_argument("--before", type=Path, help="an earlier result file: print ratios to it")
    parser.add_argument("--quick", action="store_true", help="a few small shapes, to check that everything runs")
    parser.add_argument("--parts", default="ceilings,correctness,kernels,steps,engine,peer")
    parser.add_argument("--attention", help="attention backend, as `--attention` of the server")
    args = parser.parse_args(argv)
    device = choose_device()
    make_current(device)
    plan = MeasurePlan.quick() if args.quick else MeasurePlan()
    record = Record(device, args.minutes * 60, args.out, settings=vars(args))
    parts = args.parts.split(",")
    with torch.inference_mode():
        if "ceilings" in parts:
            record.attempt("ceilings", lambda: kernels.measure_ceilings(record, plan))
        if "correctness" in parts:
            correctness.check(record, plan)
        if "kernels" in parts:
            record.attempt("kernels", lambda: kernels.measure(record, plan, args.attention))
        presets = [preset for preset in args.presets.split(",") if {"steps", "engine", "peer"} & set(parts)]
        for number, preset in enumerate(presets):
            _preset(record, plan, preset, record.seconds_left / (len(presets) - number), parts, args.attention)
    record.write()
    print(render(record, args.before))
    return 0 if record.is_valid and not record.failed else 1


def _preset(
    record: Record, plan: MeasurePlan, preset: str, budget_s: float, parts: Sequence[str], attention: str | None
) -> None:
    """Levels S and E of one model, and its peer, in about `budget_s` seconds."""
    until = record.elapsed + budget_s
    rigs: list[Rig] = []
    if "steps" in parts or "engine" in parts:
        record.attempt(f"{preset}: load", lambda: rigs.append(_loaded(record, plan, preset, attention)))
    for rig in rigs:
        if "steps" in parts:
            measure_steps(record, plan, rig, until)
        if "engine" in parts:
            measure_engine(record, plan, rig, until)
    while rigs:
        rigs.pop().close()
    if "peer" in parts:
        limit_s = max(until - record.elapsed, MIN_PEER_S)
        record.attempt(f"{preset}: peer", lambda: peer.measure(record, plan, preset, attention), limit_s)


def _loaded(record: Record, plan: MeasurePlan, preset: str, attention: str | None) -> Rig:
    rig = Rig(preset, plan, attention)
    record.models[preset] = rig.facts()
    return rig


if __name__ == "__main__":
    sys.exit(main())
