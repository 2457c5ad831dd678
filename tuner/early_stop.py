"""When a trial's run ends early: it surely misses a limit, fails, or is overrun. Never for being slow alone."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.config import BenchConfig
from tuner.objective import Limit

if TYPE_CHECKING:
    from tuner.evaluate import Bench

# A run is ended where it is surely this much beyond a limit; closer than that it is measured to its end.
FACTOR = 1.5
ERROR_SHARE = 0.20
REASONS = frozenset(("limit_missed", "overload", "error_share"))


def stopping_early(bench: "Bench") -> BenchConfig:
    """The load of a study with the rules that end a hopeless run; what is measured until then is the trial's result."""
    load = bench.load
    changes = {
        "stop_when_missed": (*load.stop_when_missed, *bench.limits),
        "max_error_share": load.max_error_share if load.max_error_share is not None else ERROR_SHARE,
        "stop_on_overload": load.stop_on_overload or load.is_open_loop,
    }
    return BenchConfig.model_validate(load.model_dump(exclude_none=True, exclude_unset=True) | changes)


def hopeless(limits: tuple[Limit, ...]) -> tuple[str, ...]:
    """The bounds beyond which a limit is out of reach, as a load states them.

    >>> hopeless((Limit("ttft_p95_ms", max=1000.0), Limit("error_rate", max=0.01)))
    ('ttft_p95_ms < 1500',)
    """
    from reports.intervals import has_interval

    known = [limit for limit in limits if has_interval(limit.metric)]
    return tuple(
        f"{limit.metric} < {FACTOR * limit.max:.10g}"
        if limit.max is not None
        else f"{limit.metric} > {(limit.min or 0.0) / FACTOR:.10g}"
        for limit in known
    )


def early_reason(run: Path) -> str:
    """The rule that ended this run before its time; empty where none did."""
    try:
        manifest = json.loads((run / "manifest.json").read_text())
    except (OSError, ValueError):
        return ""
    reason = str(manifest.get("stop_reason") or "")
    return reason if reason in REASONS else ""
