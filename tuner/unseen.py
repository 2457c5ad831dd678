"""Configurations that a cost model has not seen: predicted, then launched, so that what was predicted can be judged."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.costs import Costs
from tuner.errors import SpaceError
from tuner.evaluate import Bench, evaluate
from tuner.forecast import load_of, predict
from tuner.measure import Evaluate, Measurer, describe
from tuner.objective import Objective
from tuner.outcome import TrialResult, read_result
from tuner.prepare import Prepared
from tuner.resolve import key_of, resolved
from tuner.space import SearchSpace, known_settings, server_config
from tuner.sweep_cli import draw
from tuner.validate import NAMES, Held

LEDGER_FILE = "ledger.jsonl"
# Points drawn for each one wanted: some are refused, known, or have no room.
DRAWN_FOR_EACH = 8


def launch_unseen(
    prepared: Prepared,
    costs: Costs,
    folder: Path,
    count: int,
    bench: Bench,
    *,
    seen: Sequence[TrialResult] = (),
    seed: int = 0,
    evaluate: Evaluate = evaluate,
) -> list[Held]:
    """Predict and then launch configurations of a study's space that `seen` does not have; those that were measured.

    What was predicted is in `ledger.jsonl` before its launch. Launches that lie in the folder are not made again.
    Raises SpaceError, ForecastError.
    """
    objective = Objective.of(prepared.config.objective)
    measurer = Measurer(folder, bench, objective, evaluate)
    found = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, (settings, predicted) in enumerate(_predicted(prepared, costs, count, seen, seed)):
        directory = folder / f"{number:02d}"
        result = read_result(directory)
        if result is None or result.settings != settings or result.outcome == "failed":
            with (folder / LEDGER_FILE).open("a") as file:
                file.write(json.dumps({"settings": settings, "predicted": predicted}, default=str) + "\n")
            bench.progress.say(f"launch {number + 1} of {count}")
            result = measurer.measure(settings, directory, number, "validate")
            bench.progress.say("  " + describe(result, objective))
        if result.outcome == "measured" and all((result.measured.get(name) or 0) > 0 for name in NAMES):
            measured = {name: float(result.measured[name] or 0) for name in NAMES}
            found.append(Held(settings, measured, predicted, number))
    return found


def _predicted(
    prepared: Prepared, costs: Costs, count: int, seen: Sequence[TrialResult], seed: int
) -> Iterator[tuple[dict[str, Any], Mapping[str, float]]]:
    """The first so many configurations that are new, allowed and predicted."""
    config, load = prepared.config, prepared.load
    from tuner.identity import params_of

    space = SearchSpace.of(params_of(config), config.forbid, known_settings())
    fixed = {"model_id": config.server.model_id, **config.server.fixed}
    known = {key_of(each.settings) for each in seen}
    base = costs.reference.for_load(load)
    played = load_of(load, with_ids=bool(base.options.get("use_prefix_caching")), client=costs.client)
    left = count
    for drawn in draw(space, fixed, DRAWN_FOR_EACH * count, seed):
        settings = space.with_models(resolved(drawn))
        scheme = str(settings.get("quantize") or "none")
        if not left or key_of(settings) in known or scheme not in costs.models or not _is_allowed(settings):
            continue
        known.add(key_of(settings))
        predicted = predict(base.with_settings(settings, costs.pool), costs.models[scheme], played, NAMES)
        if all(predicted.get(name, 0) > 0 for name in NAMES):
            left -= 1
            yield settings, predicted


def _is_allowed(settings: Mapping[str, Any]) -> bool:
    try:
        server_config(settings)
    except SpaceError:
        return False
    return True
