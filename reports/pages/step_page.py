"""The page of `text-generation-benchmark`: prefill and decode of one model server by batch size."""

from typing import Any

import pandas as pd

from reports.document import Block, Estimate, Facts, Plot, Report, Section, Table, VerdictLine, format_number
from reports.plots import step_plots

DECODE = "Decode (token)"
NOTE = (
    "Below each average: its 95 % interval, from the runs as independent values. p90 needs 10 runs, p99 "
    "needs 100. Times are those of the benchmark's client, with the wire to the model server."
)
THROUGHPUT_NOTE = "Prefill counts the first token of each request, as TGI; prefill (prompt) the tokens of the prompts."


def build_step_report(
    model: str,
    latencies: pd.DataFrame,
    throughputs: pd.DataFrame,
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...],
) -> Report:
    """The report of a benchmark of steps.

    Both frames: step, batch_size, runs, average, half_interval, lowest, highest, p50, p90, p99; in ms, and in tokens/s.
    """
    sections = (
        Section("Latency", _blocks("latency", latencies, "ms  ↓ better", "ms", NOTE)),
        Section("Throughput", _blocks("throughput", throughputs, "tokens/s  ↑ better", "tokens/s", THROUGHPUT_NOTE)),
        Section("Measured", (Facts(facts),)),
    )
    runs = int(latencies["runs"].min())
    subtitle = f"Steps of the model server alone, {runs} {'run' if runs == 1 else 'runs'} of each batch size"
    return Report(f"Benchmark of {model}", subtitle, (_verdict(latencies, throughputs),), sections)


def _verdict(latencies: pd.DataFrame, throughputs: pd.DataFrame) -> VerdictLine:
    """One decode step of the smallest and of the largest batch."""
    steps = latencies[latencies["step"] == DECODE].sort_values("batch_size")
    rates = throughputs[throughputs["step"] == "Decode"].sort_values("batch_size")
    parts = [
        f"{format_number(float(step['average']))} ms and {format_number(float(rate['average']))} tokens/s with batch "
        f"size {step['batch_size']}"
        for (_, step), (_, rate) in zip(steps.iterrows(), rates.iterrows(), strict=True)
    ]
    shown = parts[:1] if len(parts) == 1 else [parts[0], parts[-1]]
    return VerdictLine("valid", "Measured", f"A decode step takes {'; '.join(shown)}.")


def _blocks(name: str, frame: pd.DataFrame, axis_title: str, unit: str, note: str) -> tuple[Block, ...]:
    blocks: list[Block] = []
    if frame["batch_size"].nunique() > 1:
        shown = frame[frame["step"] != "Decode (total)"]
        blocks.append(
            Plot(
                f"{name}_by_batch_size",
                f"{name.capitalize()} by batch size",
                "Averages with their 95 % intervals.",
                f"Lines of {unit} over the batch size, {shown['step'].nunique()} steps.",
                lambda size: step_plots.by_batch_size(shown, axis_title, unit, size),
                is_full_width=True,
            )
        )
    rows = [_row(row, has_percentiles=name == "latency") for _, row in frame.iterrows()]
    blocks.append(Table(f"{name.capitalize()}, {unit}", pd.DataFrame(rows), note))
    return tuple(blocks)


def _row(row: "pd.Series[Any]", has_percentiles: bool) -> dict[str, object]:
    average, half = float(row["average"]), row["half_interval"]
    known = not pd.isna(half)
    estimate = Estimate(average, average - half, average + half) if known else Estimate(average)
    percentiles = {name: None if pd.isna(row[name]) else float(row[name]) for name in ("p50", "p90", "p99")}
    return {
        "step": row["step"],
        "batch size": int(row["batch_size"]),
        "average": estimate,
        **(percentiles if has_percentiles else {}),
        "lowest": float(row["lowest"]),
        "highest": float(row["highest"]),
    }
