"""Damaged bytes for every reader of untrusted bytes: `python -m benchmarks.robustness.fuzz`.

Each reader must return or raise one of its refusals within 10 s. `--target`, `--seed` and `--case` replay a case.
Writes `benchmarks/results/fuzz.json`.
"""

import argparse
import json
import random
import secrets
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.robustness.damage import damaged
from benchmarks.robustness.targets import FuzzTarget, all_targets
from loadgen.target.machine import describe_machine

RESULT = Path(__file__).parents[1] / "results" / "fuzz.json"
CASES, LIMIT_S = 5_000, 10.0


class FuzzFindingError(AssertionError):
    """A case that a reader neither reads nor refuses; the message has the command that replays it."""


@dataclass(frozen=True, slots=True)
class FuzzCount:
    """Numbers of cases of one target."""

    cases: int
    read: int
    refused: int
    bytes: int
    seconds: float
    slowest_s: float


def fuzz(target: FuzzTarget, seed: int, cases: range) -> FuzzCount:
    """Run cases of one target. Raises FuzzFindingError."""
    read = size = 0
    slowest_s, begin_s = 0.0, time.monotonic()
    for number in cases:
        draw = random.Random(f"{seed} {target.name} {number}")
        data = damaged(draw.choice(target.examples), draw)
        size += len(data)
        start_s = time.monotonic()
        read += _is_read(target, data, f"--target {target.name} --seed {seed} --case {number}")
        slowest_s = max(slowest_s, time.monotonic() - start_s)
    if slowest_s > LIMIT_S:
        raise FuzzFindingError(
            f"{target.name}: a case of seed {seed} took {slowest_s:.1f} s but the limit is {LIMIT_S:g} s"
        )
    return FuzzCount(
        len(cases), read, len(cases) - read, size, round(time.monotonic() - begin_s, 2), round(slowest_s, 4)
    )


def _is_read(target: FuzzTarget, data: bytes, replay: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            target.read(data, Path(folder))
        except target.refusals:
            return False
        except Exception as error:
            raise FuzzFindingError(f"{type(error).__name__} in {target.name}: {error}; replay with {replay}") from error
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES, help=f"Cases of each target. Default {CASES}.")
    parser.add_argument("--seed", type=int, help="Random seed. Default a new one, which is printed.")
    parser.add_argument("--target", help="Run this target only. Default all of them.")
    parser.add_argument("--case", type=int, help="Run this case of the target only.")
    args = parser.parse_args()
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        targets = all_targets(Path(folder))
        for name in [args.target] if args.target else targets:
            cases = range(args.cases) if args.case is None else range(args.case, args.case + 1)
            counts[name] = fuzz(targets[name], seed, cases)
            print(f"{name:24} {counts[name]}", flush=True)
    if args.target is None and args.case is None:
        found = {
            "seed": seed,
            "machine": describe_machine(),
            "targets": {name: asdict(each) for name, each in counts.items()},
        }
        RESULT.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
