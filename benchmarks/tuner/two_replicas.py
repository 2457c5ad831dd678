"""Two replicas behind nginx under shared prefixes: the prediction of `tgi-tune plan`'s simulation, and the measurement.

    python -m benchmarks.tuner.two_replicas

For each policy two replicas of preset:tiny-llama start with an empty cache, behind nginx with the configuration of
`tgi-tune export --as nginx`. The prompts have 64 prefixes, more than one replica can cache. The costs are fitted to the
steps of a separate run (round robin, other prompts). Then the simulation of `plan` serves the measured run's requests
at their times. A hash divides the prefixes by chance: `prefix_hash` is simulated with 16 hashes. Takes 7 minutes.
"""

import argparse
import contextlib
import json
import re
import statistics
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.library import measure
from loadgen.target.machine import describe_machine
from tests.support.servers.launched_server import Server, serve
from tests.support.servers.programs.nginx import nginx
from tuner.servers.nginx_balancer import nginx_balancer
from tuner.simulator.capacity_planning.fleet import POLICIES
from tuner.simulator.fitting.client_cost import client_cost_of
from tuner.simulator.fitting.cost_file import Costs, fit_costs
from tuner.simulator.fitting.traced_steps import read_steps
from tuner.simulator.load import load_of
from tuner.simulator.predict import law_of
from tuner.simulator.simulated_metrics import metrics_of
from tuner.simulator.simulation import Simulation

RESULTS = Path(__file__).parents[1] / "results" / "two_replicas.json"
COMPARED = ("round_robin", "least_loaded", "prefix_hash")
METRICS = ("requests_per_s", "ttft_p50_ms", "ttft_p95_ms", "tpot_mean_ms", "e2e_p50_ms", "e2e_p95_ms")
HASHES = 16
FLAGS = ("--compute-threads", "1", "--max-input-tokens", "1024", "--max-total-tokens", "1200")
MEMORY_GIB = 0.03


def load_settings(rate: float, duration_s: float, seed: int) -> dict[str, Any]:
    """The load of one run; its prompts and arrivals follow from the seed."""
    return {
        "mode": "poisson",
        "rate": rate,
        "warmup": 10.0,
        "duration": duration_s,
        "workload": "shared_prefix",
        "prefix_groups": 64,
        "prefix_tokens": 512,
        "input_tokens": "uniform:16,64",
        "output_tokens": "32",
        "seed": seed,
    }


def measured(policy: str, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The metrics of one run. Leaves the run and the steps of each replica in `folder`."""
    folder.mkdir()
    steps = [folder / f"steps-{number}.jsonl" for number in range(2)]
    with contextlib.ExitStack() as held:
        servers = [
            held.enter_context(serve(*FLAGS, "--cpu-memory-gib", str(MEMORY_GIB), "--step-trace", str(path)))
            for path in steps
        ]
        url = held.enter_context(nginx(folder, nginx_balancer(policy, [server.url[7:] for server in servers])))
        own = [f"{server.url}/metrics" for server in servers]
        run = measure(url=url, metrics_url=own, out=folder / "run", **settings)
        cached, total = (sum(counter(server, name) for server in servers) for name in ("prefix_hit", "prompt"))
    found = {name: float(run.value(name) or 0) for name in METRICS}
    return {**found, "cached_share": cached / total, "verdict": run.verdict.value}


def counter(server: Server, name: str) -> float:
    """Tokens counted since the start of a server: `prefix_hit` or `prompt`."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return float(re.findall(rf"^tgi_{name}_tokens (\S+)$", text, re.MULTILINE)[0])


def predicted(policy: str, settings: Mapping[str, Any], costs: Costs) -> dict[str, float]:
    """The mean metrics of simulated runs with the same requests, which differ in the hash."""
    config = parsing.load(BenchConfig, dict(settings))
    server = costs.reference
    law = law_of(server, costs.of(server.settings))
    rows: list[dict[str, float]] = []
    for seed in range(HASHES if policy == "prefix_hash" else 1):
        load = load_of(config, with_ids=True, client=costs.client)
        replicas = [(server.rule, law)] * 2
        run = Simulation(
            load, replicas, max_concurrent_requests=2 * server.max_concurrent_requests, policy=POLICIES[policy](seed)
        ).run()
        cached, total = (
            sum(values)
            for values in zip(*((each.cached_tokens, each.input_tokens) for each in run.flights), strict=True)
        )
        rows.append({**metrics_of(run, METRICS), "cached_share": cached / total})
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def compared(rate: float, duration_s: float, folder: Path) -> dict[str, Any]:
    """The measured and the predicted metrics of every policy."""
    settings = load_settings(rate, duration_s, seed=1)
    fitted = load_settings(rate, duration_s, seed=2)
    seen = measured("round_robin", fitted, folder / "costs")
    traces = [folder / "costs" / f"steps-{number}.jsonl" for number in range(2)]
    costs = fit_costs([read_steps(path) for path in traces], [client_cost_of(folder / "costs" / "run")] * 2)
    # The error of the fit on its own run. A larger error on the others means that the machine changed in between.
    own = {"measured": seen, "predicted": predicted("round_robin", fitted, costs)}
    print(lines_of("fitted run", **own), flush=True)
    rows = {}
    for policy in COMPARED:
        rows[policy] = {
            "measured": measured(policy, settings, folder / policy),
            "predicted": predicted(policy, settings, costs),
        }
        print(lines_of(policy, **rows[policy]), flush=True)
    result = {"load": settings, "fitted_run": own, "policies": rows, "memory_gib": MEMORY_GIB}
    return {**result, "machine": describe_machine()}


def lines_of(policy: str, measured: Mapping[str, float], predicted: Mapping[str, float]) -> str:
    """A line for each metric."""
    lines: Sequence[str] = [
        f"{policy:<14}{name:<16}measured {seen:8.3g}  predicted {value:8.3g}  {value / seen - 1:+.0%}"
        for name, value in predicted.items()
        if (seen := measured[name])
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second of both (%(default)g)")
    parser.add_argument("--duration", type=float, default=60.0, help="measured seconds of a run (%(default)g)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the result (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compared(args.rate, args.duration, Path(folder))
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
