"""Plans with other seeds, against the smallest sufficient fleets of `benchmarks/tuner/plans.py`.

    python -m benchmarks.tuner.replans --seeds 0 1 --out benchmarks/results/replans.json

The long simulations of `plans` give the smallest fleet of each rate and TTFT limit that reaches the target. They do not
depend on the seed of a plan, so plans with new seeds are compared with the same fleets in a minute each instead of an
hour. Seed 0 repeats the stored plans: a bound that differs from the stored one shows that the simulator has changed,
and that the long simulations have to be repeated.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.tuner.plans import FLEET, RESULTS, PlanCase, slo
from loadgen.target.machine import describe_machine
from reports.stats.estimators import wilson
from tuner.simulator.capacity_planning.fleet_size import size_fleet


@dataclass(frozen=True, slots=True)
class Replan:
    """One plan. smallest: the smallest fleet that reaches the target."""

    load: float
    replicas: int
    policy: str
    ttft_limit_ms: float
    seed: int
    named: int
    claimed: float
    smallest: int

    @property
    def is_kept(self) -> bool:
        return self.named >= self.smallest

    @property
    def is_near(self) -> bool:
        return self.named <= self.smallest + 1


def replanned(case: PlanCase, capacity: float, seed: int) -> Replan:
    """The plan of a stored case with another seed. capacity: of one replica."""
    fleet = replace(FLEET, first_seed=1000 * seed)
    sized = size_fleet(fleet, slo(case.ttft_limit_ms), case.load * case.replicas * capacity, case.policy)
    lower = round(sized.at.lower, 4)
    smallest = smallest_of(case)
    key = (case.load, case.replicas, case.policy, case.ttft_limit_ms)
    return Replan(*key, seed, sized.at.replicas, lower, smallest)


def smallest_of(case: PlanCase) -> int:
    """The smallest sufficient fleet; known if the stored plan kept its promise."""
    assert case.is_kept, "the stored case has no sufficient fleet"
    return case.named - case.above


def stored_plans(path: Path = RESULTS) -> tuple[float, list[PlanCase]]:
    """The capacity of one replica, and the cases whose smallest sufficient fleet is known."""
    content = json.loads(path.read_text())
    cases = [PlanCase(**row) for row in content["cases"]]
    return content["capacity_requests_per_s"], [case for case in cases if case.is_kept]


def summary_of(plans: Sequence[Replan]) -> dict[str, Any]:
    count = len(plans)
    kept, near = sum(each.is_kept for each in plans), sum(each.is_near for each in plans)
    return {
        "plans": count,
        "kept": kept,
        "at_most_one_above": near,
        "exactly_smallest": sum(each.named == each.smallest for each in plans),
        "lower_95_bounds": {
            name: round(wilson(found, count).lo, 3) for name, found in (("kept", kept), ("at_most_one_above", near))
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--replicas", type=int, nargs="+", default=list(range(2, 9)))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="Write the plans here, after each seed.")
    args = parser.parse_args()
    capacity, cases = stored_plans()
    cases = [case for case in cases if case.replicas in args.replicas]
    started, plans = time.monotonic(), list[Replan]()
    with ProcessPoolExecutor(args.jobs) as pool:
        for seed in args.seeds:
            found = list(pool.map(replanned, cases, [capacity] * len(cases), [seed] * len(cases)))
            plans += found
            changed = [each for each, case in zip(found, cases, strict=True) if each.claimed != case.claimed]
            print(f"seed {seed}: {json.dumps(summary_of(found))}", flush=True)
            if seed == 0:
                print(f"other bounds than stored: {len(changed)} of {len(found)}", flush=True)
            if args.out:
                content = {
                    "command": "python -m benchmarks.tuner.replans " + " ".join(sys.argv[1:]),
                    "machine": describe_machine(),
                    "seconds": round(time.monotonic() - started),
                    "summaries": {
                        str(one): summary_of([each for each in plans if each.seed == one])
                        for one in dict.fromkeys(each.seed for each in plans)
                    },
                    "plans": [asdict(each) for each in plans],
                }
                args.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
