"""`tgi-tune simulate sweep --points`: the best configuration of a space at each of several loads."""

from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.capacity.load_list import parse_points
from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from tuner.errors import NotSimulatedError


def loads_at(config: BenchConfig, points: str) -> list[tuple[float, BenchConfig]]:
    """The load at each point: users of a closed loop, requests/s of an open one. Raises UsageError."""
    quantity = "rate" if config.is_open_loop else "concurrency"
    if config.is_open_loop and config.rate is None:
        raise NotSimulatedError(f"`points` needs a load with users or a rate, but `mode` is {config.mode}")
    given = {name: value for name, value in config.model_dump().items() if name in config.model_fields_set}
    return [
        (load, parsing.load(BenchConfig, {**given, quantity: load if config.is_open_loop else int(load)}))
        for load in parse_points(points)
    ]


def best_row(
    load: float, rows: Sequence[Mapping[str, Any]], base: Mapping[str, float], objective: str
) -> dict[str, Any]:
    """The best of sorted rows at a load, and its gain in percent over the base's objective."""
    best = rows[0]
    value, before = best["metrics"].get(objective, 0.0), base.get(objective)
    gain = 100 * (value / before - 1) if before else None
    return {"load": load, "settings": best["settings"], "metrics": best["metrics"], "gain_percent": gain}


def printed_row(found: Mapping[str, Any], unit: str, names: Sequence[str], objective: str) -> dict[str, Any]:
    """The row of a table: the load, the searched settings, the objective, and the gain."""
    gain = found["gain_percent"]
    return {
        unit: f"{found['load']:g}",
        **{name: found["settings"].get(name) for name in names},
        objective: found["metrics"].get(objective),
        "gain, %": None if gain is None else round(gain, 1),
    }
