"""A server that continues requests whose clients left is named; a server that drops them is not."""

import dataclasses

import pytest

from reports.metrics.summary import summarize
from reports.run_schema import Status
from tests.support.samples.sample_run import SampleLoad, sample_run


@pytest.mark.parametrize(("in_server", "is_named"), [(24.0, True), (12.5, False)])
def test_servers_6_a_server_that_keeps_abandoned_requests_is_named(in_server: float, is_named: bool) -> None:
    run = sample_run(SampleLoad(mode="closed", concurrency=12, failure_share=0))
    records = [
        dataclasses.replace(record, status=Status.ABANDONED) if number % 3 == 0 else record
        for number, record in enumerate(run.records)
    ]
    gauges = [
        {"t_s": float(t_s), "name": name, "labels": "", "value": value}
        for t_s in range(60)
        for name, value in (("tgi_batch_current_size", in_server - 2), ("tgi_queue_size", 2.0))
    ]

    summary = summarize(dataclasses.replace(run, records=records, server_metrics=gauges))

    found = summary["abandoned"]
    assert found["in_server"] == pytest.approx(in_server)
    assert found["in_flight"] == pytest.approx(12, rel=0.05)
    assert found["fraction"] == pytest.approx(1 / 3, abs=0.02)
    checks = [finding["check"] for finding in summary["verdict"]["findings"]]
    assert ("abandoned_kept" in checks) is is_named
