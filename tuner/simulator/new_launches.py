"""Launches new configurations to validate a cost model. Each is predicted before its launch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.servers.select import server_of
from tuner.servers.tuned_server import why_rejected
from tuner.simulator.fitting.cost_file import Costs
from tuner.simulator.load import load_of
from tuner.simulator.predict import predict
from tuner.simulator.proposal_ledger import LEDGER_FILE
from tuner.simulator.simulated_server import scheme_of
from tuner.simulator.validate import NAMES, PredictedLaunch
from tuner.space.configuration import key_of
from tuner.space.search_space import SearchSpace
from tuner.study.identity import params_of
from tuner.study.prepare_study import PreparedStudy
from tuner.trial.evaluate import TrialSetup, evaluate
from tuner.trial.measure import Evaluate, Measurer, describe
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult, read_result

# Random points for each launch: some are rejected, already measured, or have no prediction.
DRAWN_FOR_EACH = 8


def launch_new(
    prepared: PreparedStudy,
    costs: Costs,
    folder: Path,
    count: int,
    setup: TrialSetup,
    *,
    seen: Sequence[TrialResult] = (),
    seed: int = 0,
    evaluate: Evaluate = evaluate,
) -> list[PredictedLaunch]:
    """Predict and then launch configurations of a study's space that are not in `seen`. Returns the measured ones.

    Each prediction is written to `ledger.jsonl` before its launch. Existing launches in the folder are not repeated.
    Raises SpaceError, NotSimulatedError.
    """
    objective = Objective.of(prepared.config.objective)
    measurer = Measurer(folder, setup, objective, evaluate)
    found = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, (settings, predicted) in enumerate(_predicted(prepared, costs, count, seen, seed)):
        directory = folder / f"{number:02d}"
        result = read_result(directory)
        if result is None or result.settings != settings or result.outcome == "failed":
            with (folder / LEDGER_FILE).open("a") as file:
                file.write(json.dumps({"settings": settings, "predicted": predicted}, default=str) + "\n")
            setup.progress.show(f"launch {number + 1} of {count}")
            result = measurer.measure(settings, directory, number, "validate")
            setup.progress.show("  " + describe(result, objective))
        if result.outcome == "measured" and all((result.measured.get(name) or 0) > 0 for name in NAMES):
            measured = {name: float(result.measured[name] or 0) for name in NAMES}
            found.append(PredictedLaunch(settings, measured, predicted, number))
    return found


def _predicted(
    prepared: PreparedStudy, costs: Costs, count: int, seen: Sequence[TrialResult], seed: int
) -> Iterator[tuple[dict[str, Any], Mapping[str, float]]]:
    """Settings and metrics of the first `count` quasi-random configurations that are new, allowed and predictable."""
    config, load = prepared.config, prepared.load
    server = server_of(config.server)
    space = SearchSpace.of(params_of(config), config.forbid, server.known)
    fixed = {"model_id": config.server.model_id, **config.server.fixed}
    known = {key_of(each.settings) for each in seen}
    base = costs.reference.for_load(load)
    with_ids = base.uses_prefix_caching
    simulated = load_of(load, with_ids=with_ids, client=costs.client)
    left = count
    for drawn in space.quasi_random(DRAWN_FOR_EACH * count, seed, fixed):
        settings = space.with_models(server.resolved(drawn))
        scheme = scheme_of(settings)
        is_new = key_of(settings) not in known and scheme in costs.models
        if not left or not is_new or why_rejected(settings, space, server) is not None:
            continue
        known.add(key_of(settings))
        predicted = predict(base.with_settings(settings, costs.pool), costs.of(settings), simulated, NAMES)
        if all(predicted.get(name, 0) > 0 for name in NAMES):
            left -= 1
            yield settings, predicted
