"""Writes the stationary values of the queue models that `tgi-bench selftest --statistics` checks intervals against.

Values of single-server queues come from formulas, all others from at least 10 million simulated requests (20 million
with 16 servers).

    python benchmarks/reports/stationary_values.py loadgen/selftest/stationary_values.json
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from loadgen.selftest.queue_models import MODELS
from loadgen.selftest.stationary import LEAST_REQUESTS, exact_values, simulated_values

SEED = 1_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    jobs = [(index, load) for index, model in enumerate(MODELS) for load in model.loads]
    with ProcessPoolExecutor(args.processes) as pool:
        found = list(pool.map(_values, jobs))
    named = {f"{MODELS[index].name} {load:g}": values for (index, load), values in zip(jobs, found, strict=True)}
    args.file.write_text(json.dumps(named, indent=1) + "\n")


def _values(job: tuple[int, float]) -> dict[str, float]:
    index, load = job
    model = MODELS[index]
    if model.servers in (0, 1):
        return exact_values(model, load)
    # With 16 servers, waits are correlated over hundreds of requests, so more requests are simulated.
    return simulated_values(model, load, SEED + index, LEAST_REQUESTS * (2 if model.servers else 1))


if __name__ == "__main__":
    main()
