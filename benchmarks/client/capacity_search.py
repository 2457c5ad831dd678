"""Coverage, width and measuring time of `tgi-bench search` on servers of known capacity, in virtual time.

Runs the real search policy, stop rules and statistics many times on simulated queues. The comparison is a bisection
down to the interval width of the search; it measures each load until its attainment significantly meets or misses the
target. `--truth` simulates the capacities again.

    python -m benchmarks.client.capacity_search --searches 1000 --json benchmarks/results/capacity_search.json

With `--store FILE`, each finished search is appended to FILE, and a search that is already there is not repeated: the
same command continues after an interruption. `--within S` starts no search after S seconds; the rows then have the
searches so far.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from loadgen.capacity.search_policy import SearchGoal
from loadgen.selftest.virtual_search import KNOWN_SERVERS, KnownServer, VirtualSearch, stationary_attainment
from loadgen.target import machine
from reports.stats.capacity import BRACKET_Z
from reports.stats.estimators import wilson

MAX_RUNS_OF_A_LOAD = 8
SLICE = 8
"""Searches that are started together."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one search; the bounds are NaN without an interval."""

    value: float
    lo: float
    hi: float
    runs: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """All searches on one server. Widths are relative to the capacity."""

    server: str
    capacity: float
    searches: int
    printed: float
    coverage: float
    capacity_below: int
    capacity_above: int
    width_p50: float
    width_p90: float
    runs_p50: float
    time_s_p50: float
    time_s_mean: float
    bisection_time_s_p50: float
    bisection_coverage: float


def search(name: str, tolerance: float, seed: int) -> Found:
    """One search on a named server."""
    server = server_of(name)
    goal = SearchGoal(*server.goal_range, server.target, tolerance, is_whole=not server.is_open)
    done = VirtualSearch(server, goal, server.time).run(seed)
    interval = done.capacity.interval
    time_s = sum(run.time_s + server.time.cool_down_s for run in done.runs)
    return Found(interval.value, interval.lo, interval.hi, len(done.runs), time_s)


def bisection(name: str, width: float, seed: int) -> Found:
    """A bisection down to a relative width. Each load is measured until it significantly meets or misses the target."""
    server = server_of(name)
    low, high = server.goal_range
    virtual = VirtualSearch(server, SearchGoal(low, high, server.target, width), server.time)
    runs, time_s = 0, 0.0
    while high - low > max(width * math.sqrt(low * high), 0.0 if server.is_open else 1.0):
        load = math.sqrt(low * high)
        load = load if server.is_open else min(max(round(load), low + 1), high - 1)
        met = effective = 0.0
        for again in range(MAX_RUNS_OF_A_LOAD):
            run = virtual.measure(load, 10**9 if again else 73, [seed, runs])
            runs, time_s = runs + 1, time_s + run.time_s + server.time.cool_down_s
            if run.is_overloaded:
                met, effective = 0.0, 1.0
                break
            met, effective = met + run.share * run.effective, effective + run.effective
            share = wilson(met, effective, BRACKET_Z)
            if share.lo >= server.target or share.hi < server.target:
                break
        low, high = (load, high) if met >= server.target * effective else (low, load)
    return Found(math.sqrt(low * high), low, high, runs, time_s)


@dataclass(frozen=True, slots=True)
class SearchStore:
    """Finished searches in a JSONL file, one a line, so that a long measurement can be continued."""

    path: Path | None

    def found(self, key: str) -> dict[int, Found]:
        """The finished searches under a key, by seed. A line that was cut off is ignored."""
        lines = self.path.read_text().splitlines() if self.path is not None and self.path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}}")]
        return {row["seed"]: Found(**row["found"]) for row in rows if row["key"] == key}

    def add(self, key: str, seed: int, found: Found) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                # The line before may have been cut off.
                file.write("\n" + json.dumps({"key": key, "seed": seed, "found": asdict(found)}))

    def completed(
        self, key: str, function: Callable[[int], Found], seeds: Sequence[int], pool: Executor, stop_s: float
    ) -> list[Found]:
        """The results for `seeds`, from the store and new ones, until the monotonic time `stop_s`."""
        found = self.found(key)
        missing = [seed for seed in seeds if seed not in found]
        for first in range(0, len(missing), SLICE):
            if time.monotonic() >= stop_s:
                break
            own = missing[first : first + SLICE]
            for seed, each in zip(own, pool.map(function, own), strict=True):
                self.add(key, seed, each)
                found[seed] = each
        return [found[seed] for seed in seeds if seed in found]


def server_of(name: str) -> KnownServer:
    return next(server for server in KNOWN_SERVERS if server.name == name)


def summarize(server: KnownServer, found: Sequence[Found], bisected: Sequence[Found]) -> Row:
    truth = server.capacity
    printed = [each for each in found if not math.isnan(each.hi - each.lo)]
    widths = [(each.hi - each.lo) / truth for each in printed]
    return Row(
        server=server.name,
        capacity=truth,
        searches=len(found),
        printed=len(printed) / len(found),
        coverage=statistics.mean(each.lo <= truth <= each.hi for each in printed),
        capacity_below=sum(truth < each.lo for each in printed),
        capacity_above=sum(truth > each.hi for each in printed),
        width_p50=statistics.median(widths),
        width_p90=float(np.quantile(widths, 0.9)),
        runs_p50=statistics.median(each.runs for each in found),
        time_s_p50=statistics.median(each.time_s for each in found),
        time_s_mean=statistics.mean(each.time_s for each in found),
        bisection_time_s_p50=statistics.median(each.time_s for each in bisected) if bisected else math.nan,
        bisection_coverage=statistics.mean(each.lo <= truth <= each.hi for each in bisected) if bisected else math.nan,
    )


def capacity(server: KnownServer, count: int) -> float:
    """The capacity, by interpolation of the logit between simulated loads near the stored value."""
    loads = [server.capacity * factor for factor in (0.97, 1.0, 1.03)]
    if not server.is_open:
        loads = [math.floor(server.capacity) - 1, math.floor(server.capacity), math.floor(server.capacity) + 1]
    shares = np.array([stationary_attainment(server, load, count) for load in loads])
    logits = np.log(shares / (1 - shares))
    print(server.name, loads, shares.round(4).tolist())
    return float(np.interp(-math.log(server.target / (1 - server.target)), -logits, loads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default=",".join(server.name for server in KNOWN_SERVERS))
    parser.add_argument("--searches", type=int, default=1_000)
    parser.add_argument("--bisections", type=int, default=200)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", type=Path, help="Append each search to this file, and continue from it.")
    parser.add_argument("--within", type=float, default=math.inf, metavar="S", help="Start no search after S seconds.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--truth", type=int, metavar="REQUESTS", help="Simulate the capacities instead.")
    args = parser.parse_args()
    servers = [server_of(name) for name in args.servers.split(",")]
    if args.truth:
        for server in servers:
            print(server.name, round(capacity(server, args.truth), 4))
        return
    rows, store, stop_s = [], SearchStore(args.store), time.monotonic() + args.within
    seeds = range(args.first_seed, args.first_seed + args.searches)
    with ProcessPoolExecutor(args.processes) as pool:
        for server in servers:
            began_s = time.monotonic()
            key = f"{server.name}, {args.tolerance:g}"
            searched = partial(search, server.name, args.tolerance)
            found = store.completed(f"search, {key}", searched, seeds, pool, stop_s)
            widths = [(each.hi - each.lo) / server.capacity for each in found if not math.isnan(each.hi - each.lo)]
            if not widths:
                continue
            width = statistics.median(widths)
            bisect = partial(bisection, server.name, width)
            # The width of the bisections is final after the last search.
            is_whole = len(found) == len(seeds)
            own = seeds[: args.bisections] if is_whole else []
            bisected = store.completed(f"bisection, {key}, {width:.6g}", bisect, own, pool, stop_s)
            row = summarize(server, found, bisected)
            rows.append(row)
            print(
                json.dumps(
                    {key: round(each, 4) if isinstance(each, float) else each for key, each in asdict(row).items()}
                )
            )
            print(f"{time.monotonic() - began_s:.0f} s", flush=True)
    if args.json:
        content = {
            "seeds": [seeds.start, seeds.stop],
            "tolerance": args.tolerance,
            "machine": machine.describe_machine(),
        }
        args.json.write_text(json.dumps(content | {"rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
