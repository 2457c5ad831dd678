"""`tgi-bench run --fail-on-slo`: the objectives that a run can decide, and the exit code of their decisions."""

from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.config.objectives import objectives_of
from loadgen.errors import UsageError
from loadgen.progress import ProgressDisplay
from reports.metrics.checks.findings import latencies_grow
from reports.metrics.judged_objectives import ObjectiveDecision, is_decidable
from reports.metrics.titles import limits_text


def check_decidable(slo: Sequence[str]) -> None:
    """Raises UsageError for a run without objectives, or with one that no run can decide."""
    if not slo:
        raise UsageError('`fail_on_slo` is set but there is no objective; add one, such as --slo "ttft_p95_ms < 500"')
    for text, objective in zip(slo, objectives_of(slo), strict=True):
        if not is_decidable(objective):
            raise UsageError(
                f"`fail_on_slo` is set but a run cannot decide the objective {text!r}; give a percentile or a mean, "
                'such as "ttft_p95_ms < 500"'
            )


SLO_EXIT_CODES = {ObjectiveDecision.MISSED: 1, ObjectiveDecision.UNDECIDED: 3}


def slo_exit_code(summary: Mapping[str, Any], progress: ProgressDisplay) -> int:
    """1 if an objective is missed, else 3 if one is undecided, else 0; shows those objectives."""
    remedies = {
        ObjectiveDecision.MISSED: "",
        ObjectiveDecision.UNDECIDED: "; the server is overloaded: lower the load"
        if latencies_grow(summary)
        else "; run longer",
    }
    for decision, code in SLO_EXIT_CODES.items():
        found = [limits_text([each["objective"]]) for each in summary["slo"]["results"] if each["decision"] == decision]
        if found:
            progress.show(f"objectives {decision}: {', '.join(found)}{remedies[decision]}")
            return code
    return 0
