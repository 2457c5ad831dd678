"""Step timings of the engine on this machine's device, checked first: the numbers behind benchmarks.

    python -m reference_server.model_server.measure --presets llama-3.2-1b,llama-3.1-8b --minutes 9 --out result.json

Ceilings, correctness, kernels, then per preset the step (level S) and the engine (level E), last Transformers'
continuous batching on the same shapes. The result file is written after every part, so that a run cut short still
reports. It needs torch, transformers, numpy and safetensors; without a GPU it runs on the CPU,
which `--quick` makes short.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from reference_server.model_server.device import choose_device, make_current
from reference_server.model_server.measure import ceilings, correctness, kernels, peer
from reference_server.model_server.measure.levels import measure_engine, measure_steps
from reference_server.model_server.measure.record import Plan, Record
from reference_server.model_server.measure.rig import Rig
from reference_server.model_server.measure.table import render

# A peer loads a model of its own, which is worth it only with time to measure it then.
LEAST_PEER_S = 45.0
DEFAULT_PRESETS = "llama-3.2-1b,llama-3.1-8b,bloom-560m"


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; 0, or 1 where a check failed or a part did."""
    parser = argparse.ArgumentParser(prog="python -m reference_server.model_server.measure", description=__doc__)
    parser.add_argument("--presets", default=DEFAULT_PRESETS, help="built-in models, by name, in order")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part is begun after this")
    parser.add_argument("--out", type=Path, help="JSON, written after every part")
    parser.add_argument("--before", type=Path, help="an earlier result: ratios to it are printed")
    parser.add_argument("--quick", action="store_true", help="few and small shapes, to see that everything runs")
    parser.add_argument("--parts", default="ceilings,correctness,kernels,steps,engine,peer")
    parser.add_argument("--attention", help="the attention backend, as `--attention` of the server")
    args = parser.parse_args(argv)
    device = choose_device()
    make_current(device)
    plan = Plan.quick() if args.quick else Plan()
    record = Record(device, args.minutes * 60, args.out, settings=vars(args))
    parts = args.parts.split(",")
    with torch.inference_mode():
        if "ceilings" in parts:
            record.attempt("ceilings", lambda: ceilings.measure(record, plan))
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


def _preset(record: Record, plan: Plan, preset: str, share: float, parts: Sequence[str], attention: str | None) -> None:
    """Levels S and E of one model, and its peer, within about `share` seconds."""
    until = record.elapsed + share
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
        limit_s = max(until - record.elapsed, LEAST_PEER_S)
        record.attempt(f"{preset}: peer", lambda: peer.measure(record, plan, preset, attention), limit_s)


def _loaded(record: Record, plan: Plan, preset: str, attention: str | None) -> Rig:
    rig = Rig(preset, plan, attention)
    record.describe(preset, rig)
    return rig


if __name__ == "__main__":
    sys.exit(main())
