"""What every word of `tgi-tune simulate` reads and says alike: costs, load, server, settings; notes, exit codes."""

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen import settings
from loadgen.config import BenchConfig
from loadgen.errors import UsageError
from tuner.costs import Costs, read_costs
from tuner.forecast import ForecastError, Server, load_of
from tuner.prepare import DEFAULT_LOAD, STUDIES
from tuner.simulate import Load

SHOWN = (
    *("output_tokens_per_s", "requests_per_s", "ttft_p50_ms", "ttft_p95_ms"),
    *("tpot_mean_ms", "e2e_p95_ms", "error_rate"),
)
COST_FILE = "cost.json"
FROM_METRICS = "from metrics: fitted to sums over seconds, not to steps"
NOT_MEASURED = "not measured: the cost model was made by hand"
TOO_POOR = 3


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cost", type=Path, metavar="FILE", help="Fitted by `simulate fit`. Default the newest study's."
    )
    parser.add_argument("--load", type=Path, metavar="FILE", help="A load file of tgi-bench. Default the study load.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="A launcher setting.")
    parser.add_argument("--requests", type=int, metavar="N", help="End after this many measured requests.")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of the load. Default 0.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Where files go. Default nowhere.")
    parser.add_argument("--force", action="store_true", help="Print although the cost model is too poor, marked.")


def opened(given: argparse.Namespace) -> tuple[Costs, BenchConfig, Server]:
    """Costs, load and the server that settings change."""
    costs = read_costs(given.cost or newest_cost())
    values = dict(settings.read_toml(given.load)) if given.load is not None else dict(DEFAULT_LOAD)
    config = settings.load(BenchConfig, {**values, "seed": given.seed})
    return costs, config, server_of(costs, settings_from(given.set)).for_load(config)


def server_of(costs: Costs, chosen: Mapping[str, Any]) -> Server:
    """The server whose settings are changed: the first measured one, or what is set. Raises ForecastError."""
    if costs.servers:
        return costs.reference
    needed = ("max_batch_prefill_tokens", "max_batch_total_tokens")
    if any(name not in chosen for name in needed):
        raise ForecastError(f"a cost model made by hand has no server: give {' and '.join(needed)} with --set")
    return Server({name: chosen[name] for name in needed}, {})


def newest_cost(studies: Path = STUDIES) -> Path:
    """The cost file of the newest study. Raises UsageError."""
    found = sorted(studies.glob(f"*/{COST_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"no study under {studies}/ has a {COST_FILE}; give --cost FILE")
    return found[-1]


def settings_from(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words; a value is read as TOML where it is, else as text. Raises UsageError."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {word}: give KEY=VALUE")
        try:
            found[key.replace("-", "_")] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.replace("-", "_")] = text
    return found


def load_for(given: argparse.Namespace, config: BenchConfig, server: Server, costs: Costs) -> Load:
    with_ids = bool(server.options.get("use_prefix_caching"))
    return load_of(config, with_ids=with_ids, requests=given.requests, client=costs.client)


def note_of(costs: Costs, *, is_forced: bool) -> str:
    """What a reader of predictions must know of their cost model; empty where there is nothing."""
    if not costs.is_measured:
        return NOT_MEASURED
    poor = "validation too poor: printed by --force" if is_forced and costs.is_poor else ""
    return "; ".join(filter(None, (FROM_METRICS if costs.is_from_metrics else "", poor)))


def exit_code(costs: Costs, *, is_forced: bool) -> int:
    if not costs.is_poor or is_forced:
        return 0
    sys.stderr.write("the cost model misses held-out steps by more than 8 %: not decided (--force)\n")
    return TOO_POOR


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    import pandas as pd

    return str(pd.DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.4g}"))
