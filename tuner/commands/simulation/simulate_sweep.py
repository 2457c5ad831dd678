"""`tgi-tune simulate sweep`: predicts many configurations of a space and writes a table and a report."""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.config import parsing
from tuner.commands.simulation.simulate_inputs import (
    METRICS,
    add_input_flags,
    exit_code,
    load_for,
    note_of,
    outside_problem,
    read_inputs,
    render_rows,
    render_table,
    settings_from,
)
from tuner.commands.simulation.simulate_loads import best_row, loads_at, printed_row
from tuner.config import LimitSection, TuneConfig
from tuner.errors import NotSimulatedError
from tuner.servers.select import server_of
from tuner.servers.tgi.settings import DEFAULTS
from tuner.simulator.predict import Predictor, predict_many, run
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace
from tuner.study.identity import params_of
from tuner.study.space_file import read_space

OBJECTIVE = "output_tokens_per_s"
PREDICTIONS = "predictions.parquet"


@dataclass(frozen=True, slots=True)
class PredictedSpace:
    """Configurations with their predicted metrics, which are empty if no request fits.

    seconds: wall time of the predictions.
    """

    parameters: Sequence[Parameter]
    limits: Sequence[LimitSection]
    predictions: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]]
    seconds: float = 0.0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Settings and metrics of each prediction. Those that meet the limits come first, then by throughput."""
        rows = [{"settings": each, "metrics": metrics} for each, metrics in self.predictions if metrics]
        return sorted(rows, key=lambda row: (self.excess(row["metrics"]) > 1, -row["metrics"].get(OBJECTIVE, 0.0)))

    def excess(self, metrics: Mapping[str, float]) -> float:
        """The largest ratio of a metric to its limit. Above 1 a limit is missed; 0 without limits."""
        return max(
            (metrics[each.metric] / float(each.max) for each in self.limits if each.max and each.metric in metrics),
            default=0.0,
        )


def add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "space", nargs="?", type=Path, metavar="SPACE.toml", help="Space file; its [param] has the settings to vary."
    )
    add_input_flags(parser)
    parser.add_argument(
        "-n", type=int, default=2000, metavar="N", help="Number of configurations to simulate. Default 2000."
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="Number of processes that simulate at the same time. Default 1.",
    )
    parser.add_argument(
        "--points",
        metavar="LIST",
        help="Loads, as 1,4,16 or 1..64: users, or requests per second of an open loop. Prints the best configuration "
        "of each load, and its gain over the settings without a search.",
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="Number of configurations to print, best first. Default 10."
    )


def sweep(args: argparse.Namespace) -> int:
    """Predict configurations of a space. With `--out`, write a table and a report."""
    costs, config, base = read_inputs(args)
    space, fixed, limits = space_of(args.space, settings_from(args.set))
    # A small space has fewer configurations than draws.
    found = {json.dumps(each, sort_keys=True): each for each in space.quasi_random(args.n, args.seed, fixed)}
    drawn = [each for each in found.values() if space.why_forbidden(each) is None]
    if args.points is not None:
        return _sweep_loads(args, PredictedSpace(space.parameters, limits, [(each, {}) for each in drawn]), fixed)
    start_s = time.perf_counter()
    predictor = Predictor(costs, base, costs.pool, load_for(args, config, base, costs), METRICS, {})
    metrics = predict_many(predictor, drawn, args.jobs)
    predicted = PredictedSpace(
        space.parameters, limits, tuple(zip(drawn, metrics, strict=True)), time.perf_counter() - start_s
    )
    rows = predicted.rows
    outside = _outside(predictor, [row["settings"] for row in rows[: args.top]])
    note = note_of(costs, is_forced=args.force, outside=outside)
    if args.out is not None:
        write_predictions(args.out, predicted, note, costs.error or "")
    if args.json:
        print(json.dumps({"configurations": len(drawn), "note": note, "rows": rows[: args.top]}, indent=2))
    else:
        text = f"simulated {len(drawn)} configurations; {len(drawn) - len(rows)} have too little K/V memory"
        print(text + (f" ({note})" if note else ""))
        print(render_table([{**row["metrics"], **row["settings"]} for row in rows[: args.top]]))
    return exit_code(costs, is_forced=args.force, outside=outside)


def _outside(predictor: Predictor, printed: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence on the first of these configurations with too many steps outside the measured sizes."""
    for settings in printed:
        server = predictor.base.with_settings(settings, predictor.pool)
        simulated = run(server, predictor.costs.of(settings), predictor.load)
        if (problem := outside_problem(predictor.costs, server, simulated)) is not None:
            return problem
    return None


def _sweep_loads(args: argparse.Namespace, space: PredictedSpace, fixed: Mapping[str, Any]) -> int:
    """Predict the configurations at each load of `--points`; print the best of each."""
    costs, config, base = read_inputs(args)
    drawn = [settings for settings, _ in space.predictions]
    found: list[Any] = []
    outside: str | None = None
    for load, each in loads_at(config, args.points):
        predictor = Predictor(costs, base, costs.pool, load_for(args, each, base, costs), METRICS, {})
        metrics = predict_many(predictor, [fixed, *drawn], args.jobs)
        predicted = PredictedSpace(space.parameters, space.limits, tuple(zip(drawn, metrics[1:], strict=True)))
        if not predicted.rows:
            raise NotSimulatedError("no configuration has enough K/V memory")
        found.append(best_row(load, predicted.rows, metrics[0], OBJECTIVE))
        outside = outside or _outside(predictor, [*([fixed] if metrics[0] else []), predicted.rows[0]["settings"]])
    note = note_of(costs, is_forced=args.force, outside=outside)
    if args.json:
        print(json.dumps({"configurations": len(drawn), "note": note, "loads": found}, indent=2))
    else:
        unit, names = "requests/s" if config.is_open_loop else "users", [each.name for each in space.parameters]
        print(f"simulated {len(drawn)} configurations at each load" + (f" ({note})" if note else ""))
        print(render_rows([printed_row(each, unit, names, OBJECTIVE) for each in found]))
    return exit_code(costs, is_forced=args.force, outside=outside)


def space_of(
    path: Path | None, fixed: Mapping[str, Any]
) -> tuple[SearchSpace, dict[str, Any], tuple[LimitSection, ...]]:
    """The space of a file, or the default one, without the fixed settings; all fixed settings; the file's limits."""
    config = parsing.load(TuneConfig, read_space(path) if path is not None else {})
    whole = SearchSpace.of(params_of(config), config.forbid, server_of(config.server).known)
    searched = tuple(parameter for parameter in whole.parameters if parameter.name not in fixed)
    limits = tuple(limit for limit in config.objective.limit if limit.max is not None)
    return SearchSpace(searched, whole.forbidden), {**config.server.fixed, **fixed}, limits


def write_predictions(directory: Path, predicted: PredictedSpace, note: str, error: str) -> None:
    """Write predictions.parquet and a report. error: a sentence on the error of the cost model, or empty."""
    import pandas as pd

    from reports.document import VerdictLine
    from reports.pages.simulation_page import build_predictions_report
    from reports.renderers.write import write_report
    from reports.study import StudyData, StudyTrial, TrialOutcome
    from tuner.study.study_report import report_knob

    directory.mkdir(parents=True, exist_ok=True)
    rows = predicted.rows
    excess = [predicted.excess(row["metrics"]) for row in rows]
    frame = pd.DataFrame([{**row["settings"], **row["metrics"]} for row in rows])
    frame.assign(excess=excess).to_parquet(directory / PREDICTIONS)
    if not rows:
        return
    trials = tuple(
        StudyTrial(
            number,
            row["settings"],
            TrialOutcome.VIOLATED if over > 1 else TrialOutcome.FEASIBLE,
            row["metrics"].get(OBJECTIVE),
            row["metrics"],
        )
        for number, (row, over) in enumerate(zip(rows, excess, strict=True))
    )
    study = StudyData(
        "Simulated sweep",
        VerdictLine("inconclusive", "", ""),
        OBJECTIVE,
        tuple(report_knob(each, DEFAULTS.get(each.name)) for each in predicted.parameters),
        trials,
        limits=tuple(f"{each.metric} <= {each.max:g}" for each in predicted.limits),
    )
    write_report(build_predictions_report(study, excess, note, predicted.seconds, error), directory)
