"""`tgi-tune simulate sweep`: many configurations of a space predicted, the best first."""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen import settings
from tuner.config import LimitSection, TuneConfig
from tuner.identity import params_of
from tuner.simulate_inputs import (
    SHOWN,
    add_input_flags,
    exit_code,
    load_for,
    note_of,
    opened,
    render_table,
    settings_from,
)
from tuner.space import SearchSpace, known_settings
from tuner.sweep import Forecaster, predict_all
from tuner.swept import Swept, write_swept


def add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("space", nargs="?", type=Path, metavar="SPACE.toml", help="Its [param] tables are drawn from.")
    add_input_flags(parser)
    parser.add_argument("-n", type=int, default=2000, metavar="N", help="Configurations. Default 2000.")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="Processes. Default 1.")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="Rows printed. Default 10.")


def sweep(given: argparse.Namespace) -> int:
    """Predict configurations of a space; with `--out` a table of all and a report."""
    costs, config, base = opened(given)
    space, held, limits = space_of(given.space, settings_from(given.set))
    drawn = draw(space, held, given.n, given.seed)
    begun_s = time.perf_counter()
    forecaster = Forecaster(costs, base, costs.pool, load_for(given, config, base, costs), SHOWN, {})
    found = predict_all(forecaster, drawn, given.jobs)
    swept = Swept(space.parameters, limits, tuple(zip(drawn, found, strict=True)), time.perf_counter() - begun_s)
    rows, note = swept.rows, note_of(costs, is_forced=given.force)
    if given.out is not None:
        write_swept(given.out, swept, note)
    if given.json:
        print(json.dumps({"configurations": len(drawn), "note": note, "rows": rows[: given.top]}, indent=2))
    else:
        without = f"simulated {len(drawn)} configurations, {len(drawn) - len(rows)} without room"
        print(without + (f" ({note})" if note else ""))
        print(render_table([{**row["metrics"], **row["settings"]} for row in rows[: given.top]]))
    return exit_code(costs, is_forced=given.force)


def space_of(
    path: Path | None, fixed: Mapping[str, Any]
) -> tuple[SearchSpace, dict[str, Any], tuple[LimitSection, ...]]:
    """The space of a file, or the derived one, without what is fixed; the settings that are; the file's limits."""
    config = settings.load(TuneConfig, settings.read_toml(path) if path is not None else {})
    whole = SearchSpace.of(params_of(config), config.forbid, known_settings())
    searched = tuple(parameter for parameter in whole.parameters if parameter.name not in fixed)
    limits = tuple(limit for limit in config.objective.limit if limit.max is not None)
    return SearchSpace(searched, whole.forbidden), {**config.server.fixed, **fixed}, limits


def draw(space: SearchSpace, held: Mapping[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    """Configurations of a space, spread evenly, that no rule of it forbids."""
    from scipy.stats import qmc

    points = qmc.Halton(max(len(space.parameters), 1), seed=seed).random(count)
    found = []
    for point in points:
        shares = [float(share) for share in point[: len(space.parameters)]]
        values = {**held, **space.at(shares, held)}
        if space.why_forbidden(values) is None:
            found.append(values)
    return found
