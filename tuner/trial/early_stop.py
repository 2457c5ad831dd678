"""Rules that end a trial's run early: a limit is certainly missed, requests fail, or an open loop is overloaded."""

import json
from collections.abc import Sequence
from pathlib import Path

from loadgen.config.bench_config import BenchConfig
from tuner.trial.objective import Limit

# A run ends early if a metric certainly exceeds its limit by this factor.
FACTOR = 1.5
MAX_ERROR_SHARE = 0.20
REASONS = frozenset(("limit_missed", "overload", "error_share"))


def with_stop_rules(load: BenchConfig, bounds: Sequence[str]) -> BenchConfig:
    """The load with the rules that end a run early. The metrics until then are the trial's result.

    bounds: bounds in the form of `stop_when_missed`, such as `ttft_p95_ms < 1500`.
    """
    changes = {
        "stop_when_missed": (*load.stop_when_missed, *bounds),
        "max_error_share": load.max_error_share if load.max_error_share is not None else MAX_ERROR_SHARE,
        "stop_on_overload": load.stop_on_overload or load.is_open_loop,
    }
    return BenchConfig.model_validate(load.model_dump(exclude_none=True, exclude_unset=True) | changes)


def limits_out_of_reach(limits: tuple[Limit, ...]) -> tuple[str, ...]:
    """The limits, relaxed by `FACTOR`, in the form of `stop_when_missed`. Metrics without an interval have none.

    >>> limits_out_of_reach((Limit("ttft_p95_ms", max=1000.0), Limit("ttft_max_ms", max=3000.0)))
    ('ttft_p95_ms < 1500',)
    """
    from reports.metrics.named_metrics import has_interval

    known = [limit for limit in limits if has_interval(limit.metric)]
    return tuple(
        f"{limit.metric} < {FACTOR * limit.max:.10g}"
        if limit.max is not None
        else f"{limit.metric} > {(limit.min or 0.0) / FACTOR:.10g}"
        for limit in known
    )


def early_reason(run: Path) -> str:
    """The rule that ended a run early; empty for a complete run."""
    try:
        manifest = json.loads((run / "manifest.json").read_text())
    except (OSError, ValueError):
        return ""
    reason = str(manifest.get("stop_reason") or "")
    return reason if reason in REASONS else ""
