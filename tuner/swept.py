"""What a sweep predicted, in order and as a report: every configuration with its metrics and by how much it misses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.config import LimitSection
from tuner.space import Parameter

OBJECTIVE = "output_tokens_per_s"
PREDICTIONS = "predictions.parquet"


@dataclass(frozen=True, slots=True)
class Swept:
    """Configurations and their predicted metrics, none where there was no room; `seconds` that predicting took."""

    parameters: Sequence[Parameter]
    limits: Sequence[LimitSection]
    predictions: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]]
    seconds: float = 0.0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Those with room, the best first: all that keep the limits, then the others, each by throughput."""
        rows = [{"settings": each, "metrics": metrics} for each, metrics in self.predictions if metrics]
        return sorted(rows, key=lambda row: (self.excess(row["metrics"]) > 1, -row["metrics"].get(OBJECTIVE, 0.0)))

    def excess(self, metrics: Mapping[str, float]) -> float:
        """The greatest quotient of a metric and its limit; above 1 a limit is missed, 0 where there is none."""
        return max(
            (metrics[each.metric] / float(each.max) for each in self.limits if each.max and each.metric in metrics),
            default=0.0,
        )


def write_swept(directory: Path, swept: Swept, note: str) -> None:
    """Write predictions.parquet, and a report of it."""
    import pandas as pd

    from reports.document import VerdictLine
    from reports.report import write_built
    from reports.simulation_report import build_predictions_report
    from reports.study import StudyData, StudyTrial, TrialOutcome
    from tuner.present import report_knob

    directory.mkdir(parents=True, exist_ok=True)
    rows = swept.rows
    excess = [swept.excess(row["metrics"]) for row in rows]
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
        tuple(map(report_knob, swept.parameters)),
        trials,
        limits=tuple(f"{each.metric} <= {each.max:g}" for each in swept.limits),
    )
    write_built(build_predictions_report(study, excess, note, swept.seconds), directory)
