"""`tgi-tune simulate fit` and `calibrate`: fit a cost model to step traces of past launches or of designed requests."""

import argparse
import json
import sys
from pathlib import Path

from loadgen.config import parsing
from loadgen.errors import UsageError
from tuner.commands.simulation.simulate_outside import add_outside_flags, calibrate_url
from tuner.simulator.fitting.client_cost import client_cost_of
from tuner.simulator.fitting.cost_file import COST_FILE, Costs, fit_costs
from tuner.simulator.fitting.traced_steps import read_steps
from tuner.simulator.simulated_server import has_float8_cache

RUN = "run"
CACHE = "kv_cache_dtype"


def _add_output_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(COST_FILE),
        metavar="FILE",
        help="File to write the step costs to. Default cost.json.",
    )


def add_fit_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "steps", nargs="+", type=Path, metavar="STEPS", help="Files of --step-trace, one for each launch."
    )
    _add_output_flag(parser)


def fit(args: argparse.Namespace) -> int:
    traces = [read_steps(path) for path in args.steps]
    return _write(args, fit_costs(traces, [client_cost_of(path.parent / RUN) for path in args.steps]))


def add_calibrate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "space", nargs="?", type=Path, metavar="SPACE.toml", help="Space file; its [server] is launched."
    )
    parser.add_argument("--model-id", metavar="ID", help="Model to serve: hub id, local directory or preset:NAME.")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("calibration"),
        metavar="DIR",
        help="Folder to write the traces to. Default calibration/.",
    )
    _add_output_flag(parser)
    add_outside_flags(parser)


def calibrate(args: argparse.Namespace) -> int:
    """Launch the server once for each `quantize` value, send designed requests, and fit the cost model.

    A searched eight-bit K/V cache has a launch of its own, with the first of these values.
    With --url the server is already running, and the model is fitted to client timings.
    """
    if args.url is not None:
        return calibrate_url(args)
    from loadgen.progress import progress_of
    from tuner.config import TuneConfig
    from tuner.servers.select import server_of
    from tuner.simulator.fitting.calibrate import run_calibration
    from tuner.space.search_space import SearchSpace
    from tuner.study.identity import params_of
    from tuner.study.space_file import read_space

    content = read_space(args.space) if args.space is not None else {}
    if args.model_id is not None:
        content = {**content, "server": {**content.get("server", {}), "model_id": args.model_id}}
    config = parsing.load(TuneConfig, content)
    server = server_of(config.server)
    if not server.writes_steps:
        raise UsageError(f"`kind` is {config.server.kind}, but only the bundled server writes step traces")
    fixed = {"model_id": config.server.model_id, **config.server.fixed}
    space = SearchSpace.of(params_of(config), config.forbid, server.known)
    design = list(server.initial_design(space, fixed) or [{}])
    searched = [{CACHE: value} for each in space.parameters if each.name == CACHE for value in each.values or ()]
    design += [{**design[0], **cache} for cache in searched if has_float8_cache(cache)]
    launches = [space.with_models(server.resolved({**fixed, **chosen})) for chosen in design]
    return _write(args, fit_costs(run_calibration(server, launches, args.out, progress_of(args))))


def _write(args: argparse.Namespace, costs: Costs) -> int:
    """Write the cost file, and print its models."""
    costs.write(args.output)
    if args.json:
        print(json.dumps(costs.to_json(), indent=2, default=str))
        return 0
    for scheme, model in costs.models.items():
        print(f"{scheme}: {model.num_steps} steps")
        for name, value in model.coefficients.items():
            print(f"  {name:<12}{value / 1e3:14.4f} us")
        if model.unknown:
            print(f"  not identifiable: {', '.join(model.unknown)}")
        for phase, median in model.errors.median.items() if model.errors is not None else ():
            p90 = model.errors.p90[phase] if model.errors is not None else 0.0
            spread = model.errors.spread.get(phase, 0.0) if model.errors is not None else 0.0
            equal = f"; equal steps differ by {spread:.1%}" if spread else ""
            print(f"  held-out {phase} steps: median error {median:.1%}, p90 {p90:.1%}{equal}")
    if costs.float8_keys is not None:
        print(f"cached keys of an eight-bit K/V cache take {costs.float8_keys:.3g} times as long")
    client = costs.client
    if client.is_known:
        print(f"client: {client.client_ns / 1e3:.0f} us a request, {client.tokenize_ns / 1e3:.1f} us a prompt token")
    print(f"wrote {args.output}", file=sys.stderr)
    return 0
