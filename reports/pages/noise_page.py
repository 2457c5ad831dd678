"""The page of a noise measurement: the regressions that the gate finds on this machine, and each run."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from reports.document import Block, Plot, Report, Section, Table, Text, VerdictLine, format_number
from reports.gate.comparison import CLEAR_EFFECT, MIN_EFFECT, CompareOptions
from reports.gate.noise import PAIRS, MetricNoise, gated_speeds
from reports.gate.noise_split import NoiseSplit, components_table
from reports.gate.side_run import FRACTIONS, SideRun, median_of, setting_of
from reports.metrics.summary import Analysis
from reports.metrics.titles import better_direction, metric_heading, percent_title
from reports.pages.run_pages import runs_section
from reports.plots import noise_plots
from reports.saved_run import load_run

TABLE_NOTE = (
    "Run to run is the standard deviation between runs; the columns of pairs have the regression that 80 % of "
    "comparisons with at most so many pairs find. Fractions are in percentage points."
)
COMPONENTS_NOTE = (
    "Standard deviations in %. Launch: between launches of one server, where more pairs help. Drift within a pair: "
    "between its two halves, which interleaved slices remove. Within run: of one slice, where longer slices help."
)


def build_noise_report(
    label: str,
    runs: Sequence[SideRun],
    found: Sequence[MetricNoise],
    options: CompareOptions,
    splits: Sequence[NoiseSplit] = (),
    reproduce: Sequence[str] = (),
) -> Report:
    """The report of a noise measurement. reproduce: command lines that repeat it."""
    sections = [Section("Noise", _noise_blocks(runs, found, options))]
    if splits:
        sections.append(Section("Where the noise is", (Table("", components_table(splits), COMPONENTS_NOTE),)))
    directories = [run.directory for run in runs if run.directory is not None]
    if directories:
        sections.append(runs_section(_analyses(directories)))
    if reproduce:
        sections.append(Section("Reproduce", tuple(Text(line, is_code=True, has_copy=True) for line in reproduce)))
    subtitle = " · ".join((f"{len(runs)} runs of one side", *filter(None, (setting_of(run) for run in runs[:1]))))
    return Report(f"Noise of {label}", subtitle, (noise_verdict(runs, found, options),), tuple(sections))


def noise_verdict(runs: Sequence[SideRun], found: Sequence[MetricNoise], options: CompareOptions) -> VerdictLine:
    """The fewest pairs that find a clear regression, or advice if the noise is too high."""
    invalid = tuple(
        f"Run {number}: {'; '.join(run.reasons)}" for number, run in enumerate(runs, 1) if run.status == "invalid"
    )
    gated = gated_speeds(found)
    if invalid or not gated:
        sentence = "A run is invalid." if invalid else "Fewer than two runs have the gated metrics."
        return VerdictLine("invalid", "Not measured", sentence, invalid)
    most, bound = PAIRS[-1], 100 * max(options.min_effect, MIN_EFFECT)
    clear = CLEAR_EFFECT * bound
    enough = next((count for count in PAIRS if all(100 * each.effects[count] <= clear for each in gated)), None)
    if enough is not None:
        size = _two_digits(max(each.effects[enough] for each in gated))
        sentence = f"With {enough} pairs, 80 % of comparisons find a regression of {size} % in any gated metric."
        return VerdictLine("valid", "Quiet enough", f"{sentence} A regression of up to {clear:g} % is small enough.")
    worst = max(gated, key=lambda each: each.effects[most])
    smallest = ", ".join(f"{metric_heading(each.name)} {_two_digits(each.effects[most])} %" for each in gated)
    return VerdictLine(
        "degraded",
        "Too noisy",
        f"With {most} pairs, 80 % of comparisons find a regression of this size: {smallest}. The smallest effect of "
        f"interest is {bound:g} %, so many comparisons are inconclusive.",
        (
            f"Longer runs, --interleave, or --min-effect {_two_digits(worst.effects[most])}% make comparisons decide.",
            "Other work on the machine raises the noise.",
        ),
    )


def _noise_blocks(runs: Sequence[SideRun], found: Sequence[MetricNoise], options: CompareOptions) -> tuple[Block, ...]:
    blocks: list[Block] = [Table("", _table(found), TABLE_NOTE)]
    with_effects = gated_speeds(found)
    if with_effects:
        effects = pd.DataFrame(
            {"metric": metric_heading(each.name), "pairs": pairs, "effect": 100 * effect}
            for each in with_effects
            for pairs, effect in each.effects.items()
        )
        bound = 100 * max(options.min_effect, MIN_EFFECT)
        blocks.append(
            Plot(
                "effects",
                "Regression that pairs find",
                f"In 80 % of comparisons. The dashed line is the smallest effect of interest, {bound:g} %.",
                f"Lines of the regression that is found over the number of pairs, {len(with_effects)} metrics.",
                lambda size: noise_plots.effects_by_pairs(effects, bound, size),
            )
        )
    dots = _deviations(runs, [each.name for each in found])
    if len(dots):
        blocks.append(
            Plot(
                "runs",
                "Runs around their median",
                f"{len(runs)} runs of the same side; rates and latencies in % of their median.",
                f"A dot for each of {len(runs)} runs and each metric.",
                lambda size: noise_plots.run_dots(dots, size),
            )
        )
    return tuple(blocks)


def _table(found: Sequence[MetricNoise]) -> pd.DataFrame:
    rows = []
    for each in found:
        scale = 100 if each.name in FRACTIONS else 1
        row: dict[str, object] = {
            "metric": f"{percent_title(each.name)} {better_direction(each.name).mark}",
            "gated": "yes" if each.is_gated else "no",
            "median": None if each.median is None else format_number(scale * each.median),
            "run to run": _percent(each.deviation, each.name),
        }
        rows.append(row | {f"{pairs} pairs": _percent(each.effects.get(pairs), each.name) for pairs in PAIRS})
    return pd.DataFrame(rows).astype(object)


def _percent(value: float | None, name: str) -> str | None:
    if value is None:
        return None
    return f"{_two_digits(value)} {'points' if name in FRACTIONS else '%'}"


def _two_digits(fraction: float) -> str:
    """A fraction in percent with two significant digits."""
    return f"{float(f'{100 * fraction:.2g}'):,g}"


def _deviations(runs: Sequence[SideRun], names: Sequence[str]) -> pd.DataFrame:
    """A row for each run and metric with a positive median; fractions have another unit and are left out."""
    rows = []
    for name in names:
        median = median_of(run.values.get(name) for run in runs)
        if name in FRACTIONS or not median:
            continue
        for number, run in enumerate(runs, 1):
            value = run.values.get(name)
            if value is not None:
                rows.append({"metric": metric_heading(name), "run": number, "change": 100 * (value / median - 1)})
    return pd.DataFrame(rows)


def _analyses(directories: Sequence[Path]) -> list[tuple[str, Analysis]]:
    return [(f"run {number}", Analysis.of(load_run(directory))) for number, directory in enumerate(directories, 1)]
