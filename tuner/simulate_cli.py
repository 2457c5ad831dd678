"""The words of `tgi-tune simulate`. None of them but `calibrate` and `validate` starts a server."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadgen import settings
from loadgen.errors import UsageError
from tuner.clientcost import client_cost_of
from tuner.costs import Costs, fit_costs
from tuner.forecast import run
from tuner.simulate import NS_PER_S, Simulated
from tuner.simulate_inputs import (
    COST_FILE,
    SHOWN,
    add_input_flags,
    exit_code,
    load_for,
    note_of,
    opened,
    render_table,
    settings_from,
)
from tuner.simulated_metrics import metrics_of
from tuner.simulated_run import write_run
from tuner.steptrace import read_steps
from tuner.sweep_cli import add_sweep_flags, sweep

RUN = "run"


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", metavar="WORD", required=True)
    for name, (summary, add_flags, _) in WORDS.items():
        word = words.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add_flags(word)
        word.add_argument("--json", action="store_true", help="Print the result as JSON.")


def simulate(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    """Run one word of `tgi-tune simulate`."""
    return WORDS[given.word][2](given)


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_input_flags(parser)
    parser.add_argument("--no-stride", action="store_true", help="Take decode steps one at a time.")


def _run(given: argparse.Namespace) -> int:
    costs, config, base = opened(given)
    chosen = settings_from(given.set)
    server = base.with_settings(chosen, costs.pool)
    load = load_for(given, config, server, costs)
    played = run(
        server, costs.of(server.settings), load, with_gaps=given.out is not None, with_strides=not given.no_stride
    )
    metrics = metrics_of(played, SHOWN)
    note = note_of(costs, is_forced=given.force)
    if given.out is not None:
        write_run(given.out, played, config, {"cost": note or "measured", **chosen})
    result = {"settings": chosen, "metrics": metrics, "bounded_by": bounded_by(played), "note": note}
    if given.json:
        print(json.dumps(result, indent=2))
    else:
        seconds = (max(flight.end_ns for flight in played.flights) if played.flights else 0) / NS_PER_S
        print(f"simulated {len(played.flights)} requests over {seconds:.1f} s" + (f" ({note})" if note else ""))
        print(render_table([metrics]))
    return exit_code(costs, is_forced=given.force)


def _explain(given: argparse.Namespace) -> int:
    costs, config, base = opened(given)
    server = base.with_settings(settings_from(given.set), costs.pool)
    played = run(server, costs.of(server.settings), load_for(given, config, server, costs))
    found = explained(played)
    print(
        json.dumps(found, indent=2)
        if given.json
        else "\n".join(f"{name:<28}{value:.4g}" for name, value in found.items())
    )
    return exit_code(costs, is_forced=given.force)


def explained(played: Simulated) -> dict[str, float]:
    """Where the time of a simulated load went: shares of the server's time, and means of a request's."""
    counts = played.replicas[0].counts
    whole_ns = max((flight.end_ns for flight in played.flights), default=1) or 1
    done = [flight for flight in played.flights if flight.status == "ok"]
    count = max(len(done), 1)
    return {
        "prefill_share": counts.prefill_ns / whole_ns,
        "decode_share": counts.decode_ns / whole_ns,
        "idle_share": 1 - (counts.prefill_ns + counts.decode_ns) / whole_ns,
        "rows_per_decode": counts.row_steps / max(counts.decodes, 1),
        "prompt_tokens_per_prefill": counts.prompt_tokens / max(counts.prefills, 1),
        "kv_tokens_peak": counts.kv_peak,
        "cached_tokens_share": counts.cached_tokens / max(counts.cached_tokens + counts.prompt_tokens, 1),
        "waiting_s": sum(flight.started_ns - flight.sent_ns for flight in done) / count / NS_PER_S,
        "prefill_s": sum(flight.first_ns - flight.started_ns for flight in done) / count / NS_PER_S,
        "decode_s": sum(flight.end_ns - flight.first_ns for flight in done) / count / NS_PER_S,
        **{f"waiting_{cause}_share": share for cause, share in played.replicas[0].waiting_shares().items()},
    }


def bounded_by(played: Simulated) -> str:
    """What kept requests waiting most; `users` where hardly anything did."""
    shares = played.replicas[0].waiting_shares()
    cause = max(shares, key=lambda name: shares[name], default="users")
    return cause if shares.get(cause, 0.0) > 0.05 else "users"


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("steps", nargs="+", type=Path, metavar="STEPS", help="Step traces, one of each launch.")
    parser.add_argument("-o", "--output", type=Path, default=Path(COST_FILE), metavar="FILE", help="Default cost.json.")


def _fit(given: argparse.Namespace) -> int:
    traces = [read_steps(path) for path in given.steps]
    return _fitted(given, fit_costs(traces, [client_cost_of(path.parent / RUN) for path in given.steps]))


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("space", nargs="?", type=Path, metavar="SPACE.toml", help="Its [server] is what is launched.")
    parser.add_argument("--model-id", metavar="ID", help="Hub id, local directory or preset:NAME.")
    parser.add_argument("--out", type=Path, default=Path("calibration"), metavar="DIR", help="Where traces go.")
    parser.add_argument("-o", "--output", type=Path, default=Path(COST_FILE), metavar="FILE", help="Default cost.json.")


def _calibrate(given: argparse.Namespace) -> int:
    """Launch the server once per `quantize` value, sweep it, and fit what it took."""
    from loadgen.progress import open_progress
    from tuner.calibrate import calibrate
    from tuner.config import TuneConfig
    from tuner.identity import params_of
    from tuner.opening import opening_moves
    from tuner.resolve import resolved
    from tuner.space import SearchSpace, known_settings

    content = settings.read_toml(given.space) if given.space is not None else {}
    if given.model_id is not None:
        content = {**content, "server": {**content.get("server", {}), "model_id": given.model_id}}
    config = settings.load(TuneConfig, content)
    if config.server.kind != "own":
        raise UsageError(f"`kind` {config.server.kind} leaves no step trace; only the bundled server is calibrated")
    fixed = {"model_id": config.server.model_id, **config.server.fixed}
    space = SearchSpace.of(params_of(config), config.forbid, known_settings())
    moves = opening_moves(space, fixed) or [{}]
    launches = [space.with_models(resolved({**fixed, **move})) for move in moves]
    return _fitted(given, fit_costs(calibrate(config.server, launches, given.out, open_progress())))


def _fitted(given: argparse.Namespace, costs: Costs) -> int:
    """Write the cost file, and print what was found."""
    costs.write(given.output)
    if given.json:
        print(json.dumps(costs.to_json(), indent=2, default=str))
        return 0
    for scheme, model in costs.models.items():
        print(f"{scheme}: {model.num_steps} steps")
        for name, value in model.coefficients.items():
            print(f"  {name:<12}{value / 1e3:14.4f} us")
        if model.unknown:
            print(f"  could not be told: {', '.join(model.unknown)}")
        for phase, median in model.errors.median.items() if model.errors is not None else ():
            p90 = model.errors.p90[phase] if model.errors is not None else 0.0
            print(f"  {phase} steps not seen: median {median:.1%}, p90 {p90:.1%}")
    client = costs.client
    if client.is_known:
        print(f"beside the steps: {client.client_ns / 1e3:.0f} us a request, {client.tokenize_ns / 1e3:.1f} us a token")
    print(f"wrote {given.output}", file=sys.stderr)
    return 0


def _add_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("space", nargs="?", type=Path, metavar="SPACE.toml", help="Space, server and load to launch.")
    parser.add_argument("--study", metavar="NAME", help="Whose launches are held out. Default the newest.")
    parser.add_argument("--configs", type=int, metavar="N", help="Launch N new configurations. With a space 8.")
    parser.add_argument("--cost", type=Path, metavar="FILE", help="That predicts. Default the study's, or the newest.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Where launches go. Default validation/.")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of the configurations drawn. Default 0.")


def _validate(given: argparse.Namespace) -> int:
    from tuner.validate_cli import validate

    return validate(given)


Word = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
WORDS: Mapping[str, Word] = {
    "run": ("Predict one configuration.", _add_run, _run),
    "sweep": ("Predict many configurations of a space.", add_sweep_flags, sweep),
    "fit": ("Fit the cost model from step traces.", _add_fit, _fit),
    "calibrate": ("Launch the server, sweep it, and fit the cost model.", _add_calibrate, _calibrate),
    "validate": (
        "Predicted against measured: a study's launches, or new ones.",
        _add_validate,
        _validate,
    ),
    "explain": ("Where the time of a configuration goes.", add_input_flags, _explain),
}
