"""The measured requests of a run, without those of its warm-up and its drain."""

from reports.run_schema import Phase, RequestRecord
from reports.run_store import RunResult


def measured(result: RunResult) -> list[RequestRecord]:
    """The records of the requests that started in the window."""
    return [record for record in result.records if record.phase == Phase.MEASURE]
