"""Shared parts of the `tgi-tune simulate` subcommands: costs, load, server, settings, notes and exit codes."""

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from tuner.errors import NotSimulatedError
from tuner.simulator.fitting.cost_file import COST_FILE, Costs, read_costs
from tuner.simulator.load import load_of
from tuner.simulator.simulated_server import SimulatedServer
from tuner.simulator.simulation import Simulated, SimulatedLoad
from tuner.simulator.step_ranges import RangeUse
from tuner.study.prepare_study import DEFAULT_LOAD, STUDIES
from tuner.study.study_folder import LOAD_FILE

METRICS = (
    *("output_tokens_per_s", "requests_per_s", "ttft_p50_ms", "ttft_p95_ms"),
    *("tpot_mean_ms", "e2e_p95_ms", "error_rate"),
)
FROM_METRICS = "from metrics: fitted to sums over seconds, not to steps"
FROM_CLIENTS = "from client timings: the server's batching rule is an estimate"
NOT_MEASURED = "not measured: the cost model was written by hand"
TOO_POOR = 3


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cost", type=Path, metavar="FILE", help="File of step costs. Default: that of the newest study."
    )
    parser.add_argument(
        "--load",
        type=Path,
        metavar="FILE",
        help=f"Load file of tgi-bench. Default: {LOAD_FILE} in the folder of the costs.",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="Setting of the launcher. Repeatable."
    )
    parser.add_argument(
        "--requests", type=int, metavar="N", help="End the simulation after this number of measured requests."
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of the prompts and arrivals. Default 0.")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="Folder to write tables and a report to. Default: no files."
    )
    parser.add_argument(
        "--force", action="store_true", help="Predict even if the cost model is too inaccurate, and add a note."
    )


def read_inputs(args: argparse.Namespace) -> tuple[Costs, BenchConfig, SimulatedServer]:
    """The costs, the load, and the base server of the flags."""
    path = args.cost or newest_cost()
    costs = read_costs(path)
    config = parsing.load(BenchConfig, {**load_values(args.load, path), "seed": args.seed})
    return costs, config, server_of(costs, settings_from(args.set)).for_load(config)


def load_values(load: Path | None, cost: Path) -> dict[str, Any]:
    """The settings of a load file. Without one: of the file next to the costs, else of the default load of a study."""
    beside = cost.with_name(LOAD_FILE)
    file = load or (beside if beside.is_file() else None)
    return dict(DEFAULT_LOAD) if file is None else dict(parsing.read_toml(file))


def server_of(costs: Costs, chosen: Mapping[str, Any]) -> SimulatedServer:
    """The base server: the first server of the cost file, or one from settings. Raises NotSimulatedError."""
    if costs.servers:
        return costs.reference
    needed = ("max_batch_prefill_tokens", "max_batch_total_tokens")
    if any(name not in chosen for name in needed):
        raise NotSimulatedError(f"the cost file has no server: set {' and '.join(needed)} with --set")
    return SimulatedServer({name: chosen[name] for name in needed}, {})


def newest_cost(studies: Path = STUDIES) -> Path:
    """The cost file of the newest study. Raises UsageError."""
    found = sorted(studies.glob(f"*/{COST_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"no study under {studies}/ has a {COST_FILE}: set --cost FILE")
    return found[-1]


def settings_from(words: Sequence[str]) -> dict[str, Any]:
    """The settings of KEY=VALUE words. A value that is not TOML is a string. Raises UsageError."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(f"--set is {word}, but must be KEY=VALUE")
        try:
            found[key.replace("-", "_")] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.replace("-", "_")] = text
    return found


def load_for(args: argparse.Namespace, config: BenchConfig, server: SimulatedServer, costs: Costs) -> SimulatedLoad:
    with_ids = server.uses_prefix_caching
    return load_of(config, with_ids=with_ids, requests=args.requests, client=costs.client)


def outside_problem(costs: Costs, server: SimulatedServer, simulated: Simulated) -> str | None:
    """A sentence on simulated steps outside the measured sizes; None if they have little time."""
    use = RangeUse.joined(replica.counts.ranges for replica in simulated.replicas)
    return use.problem(costs.of(server.settings).ranges)


def note_of(costs: Costs, *, is_forced: bool, outside: str | None = None) -> str:
    """A note on the quality of the cost model; empty if it is good. outside: the result of `outside_problem`."""
    if not costs.is_measured:
        return NOT_MEASURED
    poor = "poor cost model: printed by --force" if is_forced and (costs.is_poor or outside) else ""
    source = FROM_METRICS if costs.is_from_metrics else FROM_CLIENTS if costs.is_from_clients else ""
    return "; ".join(filter(None, (source, costs.noise, poor)))


def exit_code(costs: Costs, *, is_forced: bool, outside: str | None = None) -> int:
    problem = costs.problem or outside
    if problem is None or is_forced:
        return 0
    sys.stderr.write(f"not decided: {problem}; accept the predictions with --force\n")
    return TOO_POOR


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows with the titles of the metrics; a single row as one line for each value."""
    from reports.metrics.titles import in_percent, percent_title

    titled = [{percent_title(name): in_percent(name, value) for name, value in row.items()} for row in rows]
    if len(titled) == 1:
        [row] = titled
        width = max(map(len, row))
        return "\n".join(f"{name:<{width}}  {_shown(value):>10}" for name, value in row.items())
    return render_rows(titled)


def render_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table."""
    import pandas as pd

    return str(pd.DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.4g}"))


def _shown(value: Any) -> str:
    from reports.document import format_number

    return format_number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
