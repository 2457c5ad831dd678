"""One side of a comparison: a run with four gated metrics."""

from reports.gate.side_run import SideRun


def side(label: str = "x", **changed: float | None) -> SideRun:
    """A side with usual values of its metrics, and those of `changed`."""
    values: dict[str, float | None] = {
        "output_tokens_per_s": 1000.0,
        "ttft_p50_ms": 50.0,
        "tpot_p50_ms": 20.0,
        "error_rate": 0.0,
    }
    return SideRun(label, values | changed)
