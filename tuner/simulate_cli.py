"""The words of `tgi-tune simulate`. None of them but `calibrate` starts a server."""

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen import settings
from loadgen.config import BenchConfig
from loadgen.errors import UsageError
from tuner.clientcost import client_cost_of
from tuner.costs import Costs, fit_costs, read_costs
from tuner.forecast import ForecastError, Server, load_of, run
from tuner.prepare import DEFAULT_LOAD, STUDIES
from tuner.simulate import NS_PER_S, Load, Simulated
from tuner.simulated_metrics import metrics_of
from tuner.simulated_run import write_run
from tuner.steptrace import read_steps
from tuner.sweep import Forecaster, predict_all

SHOWN = (
    *("output_tokens_per_s", "requests_per_s", "ttft_p50_ms", "ttft_p95_ms"),
    *("tpot_mean_ms", "e2e_p95_ms", "error_rate"),
)
COST_FILE, RUN = "cost.json", "run"
FROM_METRICS = "from metrics: fitted to sums over seconds, not to steps"
NOT_MEASURED = "not measured: the cost model was made by hand"
TOO_POOR = 3
FEWEST_HELD_OUT = 3


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", metavar="WORD", required=True)
    for name, (summary, add_flags, _) in WORDS.items():
        word = words.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add_flags(word)
        word.add_argument("--json", action="store_true", help="Print the result as JSON.")


def simulate(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    """Run one word of `tgi-tune simulate`."""
    return WORDS[given.word][2](given)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cost", type=Path, metavar="FILE", help="Fitted by `simulate fit`. Default the newest study's."
    )
    parser.add_argument("--load", type=Path, metavar="FILE", help="A load file of tgi-bench. Default the study load.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="A launcher setting.")
    parser.add_argument("--requests", type=int, metavar="N", help="End after this many measured requests.")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of the load. Default 0.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Where files go. Default nowhere.")
    parser.add_argument("--force", action="store_true", help="Print although the cost model is too poor, marked.")


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--no-stride", action="store_true", help="Take decode steps one at a time.")


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("space", nargs="?", type=Path, metavar="SPACE.toml", help="Its [param] tables are drawn from.")
    _add_common(parser)
    parser.add_argument("-n", type=int, default=2000, metavar="N", help="Configurations. Default 2000.")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="Processes. Default 1.")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="Rows printed. Default 10.")


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("steps", nargs="+", type=Path, metavar="STEPS", help="Step traces, one of each launch.")
    parser.add_argument("-o", "--output", type=Path, default=Path(COST_FILE), metavar="FILE", help="Default cost.json.")


def _run(given: argparse.Namespace) -> int:
    costs, config, base = _opened(given)
    chosen = settings_from(given.set)
    server = base.with_settings(chosen, costs.pool)
    load = _load(given, config, server, costs)
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
        print(_table([metrics]))
    return _exit(costs, given)


def _explain(given: argparse.Namespace) -> int:
    costs, config, base = _opened(given)
    server = base.with_settings(settings_from(given.set), costs.pool)
    played = run(server, costs.of(server.settings), _load(given, config, server, costs))
    found = explained(played)
    print(
        json.dumps(found, indent=2)
        if given.json
        else "\n".join(f"{name:<28}{value:.4g}" for name, value in found.items())
    )
    return _exit(costs, given)


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


def _sweep(given: argparse.Namespace) -> int:
    costs, config, base = _opened(given)
    fixed = settings_from(given.set)
    drawn = draw(given.space, fixed, given.n, given.seed)
    limits = limits_of(given.space)
    load = _load(given, config, base, costs)
    forecaster = Forecaster(costs, base, costs.pool, load, SHOWN, {})
    found = predict_all(forecaster, drawn, given.jobs)
    rows = [{"settings": each, "metrics": metrics} for each, metrics in zip(drawn, found, strict=True) if metrics]
    rows.sort(key=lambda row: (-_meets(row["metrics"], limits), -row["metrics"].get("output_tokens_per_s", 0.0)))
    if given.out is not None:
        _write_predictions(given.out, rows)
    note = note_of(costs, is_forced=given.force)
    if given.json:
        print(json.dumps({"configurations": len(drawn), "note": note, "rows": rows[: given.top]}, indent=2))
    else:
        print(
            f"simulated {len(drawn)} configurations, {len(drawn) - len(rows)} without room"
            + (f" ({note})" if note else "")
        )
        print(_table([{**row["metrics"], **row["settings"]} for row in rows[: given.top]]))
    return _exit(costs, given)


def draw(space: Path | None, fixed: Mapping[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    """Configurations of a space file, spread evenly; without one, of the derived space."""
    from scipy.stats import qmc

    from tuner.config import TuneConfig
    from tuner.identity import params_of
    from tuner.space import SearchSpace, known_settings

    content = settings.read_toml(space) if space is not None else {}
    config = settings.load(TuneConfig, content)
    held = {**config.server.fixed, **fixed}
    searched = SearchSpace.of(params_of(config), config.forbid, known_settings())
    names = [parameter.name for parameter in searched.parameters if parameter.name not in fixed]
    points = qmc.Halton(max(len(names), 1), seed=seed).random(count)
    found = []
    for point in points:
        place = dict(zip(names, map(float, point), strict=False))
        values = dict(held)
        for parameter in searched.parameters:
            if parameter.name in place and parameter in searched.active(values):
                values[parameter.name] = parameter.at(place[parameter.name])
        if searched.why_forbidden(values) is None:
            found.append(values)
    return found


def limits_of(space: Path | None) -> dict[str, float]:
    """Upper limits of a space file, by metric."""
    content = settings.read_toml(space) if space is not None else {}
    limits = content.get("objective", {}).get("limit", [])
    return {str(each["metric"]): float(each["max"]) for each in limits if "max" in each}


def _meets(metrics: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    return all(metrics.get(name, 0.0) <= most for name, most in limits.items())


def _write_predictions(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pandas as pd

    directory.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame([{**row["settings"], **row["metrics"]} for row in rows])
    frame.to_parquet(directory / "predictions.parquet")


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
    parser.add_argument("--study", metavar="NAME", help="Whose launches are held out. Default the newest.")


def _validate(given: argparse.Namespace) -> int:
    """Each launched configuration of a study, predicted from the traces of the others."""
    from dataclasses import asdict

    from tuner.guide import Grade
    from tuner.prepare import stored
    from tuner.study_folder import TRIALS, StudyFolder
    from tuner.validate import LEDGER_FILE, NAMES, expectations, held_out, launched_in, summary, write_ledger

    prepared = stored(given.study)
    results = StudyFolder(prepared.folder).results(TRIALS)
    held = held_out(launched_in(prepared.folder, results, prepared.load), prepared.load)
    if len(held) < FEWEST_HELD_OUT:
        print(f"{len(held)} launches can be held out; {FEWEST_HELD_OUT} are needed", file=sys.stderr)
        return TOO_POOR
    write_ledger(prepared.folder / LEDGER_FILE, expectations(results, held))
    found = summary(held)
    noise = StudyFolder(prepared.folder).noise()
    grades = {name: errors.grade(name, (noise.of(name) if noise else None) or 0.0) for name, errors in found.items()}
    rows = [
        {
            f"{name} {kind}": values[name]
            for name in NAMES
            for kind, values in (("measured", e.measured), ("predicted", e.predicted))
        }
        for e in held
    ]
    if given.json:
        print(
            json.dumps(
                {
                    "launches": [{"settings": dict(e.settings), **row} for e, row in zip(held, rows, strict=True)],
                    "errors": {name: {**asdict(errors), "grade": grades[name]} for name, errors in found.items()},
                },
                indent=2,
            )
        )
    else:
        print(_table(rows))
        for name, errors in found.items():
            told = f"median {errors.median:.1%}  p90 {errors.p90:.1%}  level {errors.level:+.1%}"
            print(f"{name:<22}{told}  shape {errors.shape:.1%}  {grades[name]}")
    return TOO_POOR if Grade.REFUSE in grades.values() else 0


def _opened(given: argparse.Namespace) -> tuple[Costs, BenchConfig, Server]:
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


def _load(given: argparse.Namespace, config: BenchConfig, server: Server, costs: Costs) -> Load:
    with_ids = bool(server.options.get("use_prefix_caching"))
    return load_of(config, with_ids=with_ids, requests=given.requests, client=costs.client)


def note_of(costs: Costs, *, is_forced: bool) -> str:
    """What a reader of predictions must know of their cost model; empty where there is nothing."""
    if not costs.is_measured:
        return NOT_MEASURED
    poor = "validation too poor: printed by --force" if is_forced and costs.is_poor else ""
    return "; ".join(filter(None, (FROM_METRICS if costs.is_from_metrics else "", poor)))


def _exit(costs: Costs, given: argparse.Namespace) -> int:
    if not costs.is_poor or given.force:
        return 0
    print("the cost model misses held-out steps by more than 8 %: not decided (--force)", file=sys.stderr)
    return TOO_POOR


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    import pandas as pd

    return str(pd.DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.4g}"))


Word = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
WORDS: Mapping[str, Word] = {
    "run": ("Predict one configuration.", _add_run, _run),
    "sweep": ("Predict many configurations of a space.", _add_sweep, _sweep),
    "fit": ("Fit the cost model from step traces.", _add_fit, _fit),
    "calibrate": ("Launch the server, sweep it, and fit the cost model.", _add_calibrate, _calibrate),
    "validate": ("Held-out launches of a study: predicted against measured.", _add_validate, _validate),
    "explain": ("Where the time of a configuration goes.", _add_common, _explain),
}
