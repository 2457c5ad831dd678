"""`tgi-tune simulate calibrate --url` and `validate --url`: costs from client timings of a running server."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from loadgen.config import load_flags, parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.config.target_settings import OF_ACCESS
from loadgen.errors import UsageError
from loadgen.interrupts import noted
from loadgen.target.open_target import open_target
from loadgen.target.server_kind import OWN
from loadgen.target.target import TargetFacts
from tuner.commands.simulation.simulate_inputs import TOO_POOR, render_table
from tuner.errors import NotSimulatedError
from tuner.simulator.fitting.cost_file import COST_FILE, Costs, read_costs
from tuner.simulator.slot_replica import UNLIMITED_TOKENS

# Settings of the target, which have the flags of `tgi-bench run`.
TARGET_FIELDS = ("url", "api", "engine", "model", "tokenizer", "extra_body", *OF_ACCESS)
DEFAULT_USERS, DEFAULT_TOKENS = 32, 512
# Largest median errors of accurate predictions.
ACCURATE = {"output_tokens_per_s": 0.1, "tpot_mean_ms": 0.1, "ttft_p95_ms": 0.2}
HELD_OUT = "held-out"


def add_outside_flags(parser: argparse.ArgumentParser) -> None:
    load_flags.add_flags(parser, [name for name in BenchConfig.model_fields if name not in TARGET_FIELDS])
    parser.add_argument(
        "--users",
        type=int,
        default=DEFAULT_USERS,
        metavar="N",
        help=f"With --url: largest concurrency of the loads. Default {DEFAULT_USERS}.",
    )
    parser.add_argument(
        "--max-total-tokens",
        type=int,
        default=DEFAULT_TOKENS,
        metavar="N",
        help="With --url: largest sum of prompt and output tokens of one request. The server must accept it. "
        f"Default {DEFAULT_TOKENS}.",
    )


def calibrate_url(args: argparse.Namespace) -> int:
    """Measure the designed loads, fit the costs, and write the cost file."""
    from loadgen.progress import progress_of
    from tuner.simulator.outside.designed_loads import designed_loads, measure_loads
    from tuner.simulator.outside.fit_costs import fit_runs
    from tuner.simulator.outside.outside_costs import outside_costs

    if args.space is not None or args.model_id is not None:
        raise UsageError("--url is the address of a running server: remove SPACE.toml and --model-id")
    base, progress = _base(args), progress_of(args)
    loads = designed_loads(args.users, args.max_total_tokens)
    note = f"stopped, no costs are written. {args.out} has the loads measured so far: remove it or set another --out"
    with noted(note), open_target(base, args.out) as target:
        facts = target.facts(base.api, base.model, base.engine)
        _check_rule(facts)
        runs = measure_loads(loads, target, base, args.out, progress)
    progress.show("fitting the costs")
    fit = fit_runs(runs)
    server = {"model_id": facts.model, "engine": facts.kind.name, "url": base.url}
    costs = outside_costs(fit, loads, server, round(median(run.added_tokens for run in runs)))
    costs.write(args.output)
    if args.json:
        print(json.dumps(costs.to_json(), indent=2))
    else:
        print("\n".join(_described(costs)))
    print(f"wrote {args.output}", file=sys.stderr)
    return 0


def _check_rule(facts: TargetFacts) -> None:
    """Raises NotSimulatedError for the bundled server without chunked prefill: `SlotRule` cannot model its batching."""
    setting = facts.config.get("prefill_chunking")
    value = setting.get("value") if isinstance(setting, Mapping) else setting
    if facts.kind is OWN and value is False:
        raise NotSimulatedError(
            "`prefill_chunking` of the server is off, so `waiting_served_ratio` and `max_waiting_tokens` decide when "
            "requests start, which client timings do not show: use `simulate calibrate` without --url"
        )


def _described(costs: Costs) -> list[str]:
    """The lines of calibrated costs: batching rule, each cost with its interval, and held-out errors."""
    model, options = costs.of({}), costs.reference.options
    users = model.facts["measured_users"]
    slots, tokens = options["slots"], options["prefill_tokens"]
    prefill = [
        "in the same steps as decode" if options["mixes_prefill"] else "in separate steps from decode",
        "one prompt a step" if options["prefill_prompts"] == 1 else "several prompts a step",
        f"{options['steps_between']} decode steps between prefills",
        "no limit of tokens a step" if tokens == UNLIMITED_TOKENS else f"at most {tokens} tokens a step",
    ]
    lines = [
        f"slots: {slots}" if slots <= users else f"slots: at least {users}, which is the largest measured concurrency",
        "prefill: " + "; ".join(prefill),
    ]
    rows: dict[str, tuple[float, Sequence[float]]] = {
        "client": (costs.client.client_ns, model.facts["client_interval_ns"]),
        **{name: (value, model.intervals[name]) for name, value in model.coefficients.items()},
    }
    lines += [
        f"{name:<10}{value / 1e3:12.3f} us  [{low / 1e3:.3f}, {high / 1e3:.3f}]"
        for name, (value, (low, high)) in rows.items()
    ]
    if model.errors is not None:
        lines += [
            f"held-out loads, {kind}: median error {median:.1%}, p90 {model.errors.p90[kind]:.1%}"
            for kind, median in model.errors.median.items()
        ]
    if costs.problem is not None:
        lines.append(f"not usable without --force: {costs.problem}")
    return lines


def validate_url(args: argparse.Namespace) -> int:
    """Predict held-out loads, measure them, and print the errors. Exit code 3 if a median error exceeds `ACCURATE`."""
    from loadgen.progress import progress_of
    from tuner.simulator.outside.held_out_loads import held_out_loads, measure_held_out
    from tuner.simulator.validate import Errors, PredictedLaunch, summary

    if args.repeats < 1:
        raise UsageError(f"--repeats is {args.repeats}, but must be at least 1")
    base = _base(args)
    costs = read_costs(args.cost or Path(COST_FILE))
    if not costs.is_from_clients:
        raise UsageError(f"{args.cost or COST_FILE} is not from client timings: create it with `calibrate --url`")
    loads = held_out_loads(costs, base, args.users, args.max_total_tokens)
    folder = args.out or Path(HELD_OUT)
    note = f"stopped, no errors are computed. {folder} has the loads measured so far: remove it or set another --out"
    with noted(note), open_target(base, folder) as target:
        found: list[PredictedLaunch] = measure_held_out(costs, loads, target, folder, args.repeats, progress_of(args))
    errors: dict[str, Errors] = summary(found)
    is_accurate = {name: errors[name].median <= most for name, most in ACCURATE.items()}
    rows = [_row(each) for each in found]
    if args.json:
        medians = {name: {"median": each.median, "p90": each.p90} for name, each in errors.items()}
        print(json.dumps({"loads": rows, "errors": medians, "accurate": is_accurate}, indent=2))
    else:
        print(render_table(rows))
        for name, most in ACCURATE.items():
            verdict = "within" if is_accurate[name] else "above"
            print(f"{name:<22}median error {errors[name].median:.1%}, {verdict} {most:.0%}; p90 {errors[name].p90:.1%}")
    return 0 if all(is_accurate.values()) else TOO_POOR


def _row(launch: Any) -> dict[str, Any]:
    """The measured and the predicted metrics of one load."""
    values = {
        f"{name} {kind}": each[name]
        for name in ACCURATE
        for kind, each in (("measured", launch.measured), ("predicted", launch.predicted))
    }
    return {"load": launch.settings["load"], **values}


def _base(args: argparse.Namespace) -> BenchConfig:
    """The settings of the target."""
    return parsing.load(BenchConfig, {name: getattr(args, name) for name in TARGET_FIELDS})
