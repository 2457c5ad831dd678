"""A server that accepts drafts sends several tokens of a step at once: an event each, as the bundled server does."""

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.runner import measure
from loadgen.selftest.trap_behaviour import Behaviour
from loadgen.selftest.trap_server import trap_server
from loadgen.target.target import Target
from reports.metrics.summary import summarize
from tests.support.measured_requests import measured

LOAD = {
    **{"input_tokens": "8", "warmup": 0, "concurrency": 4, "requests": 12},
    **{"api": "openai-chat", "engine": "tgi", "model": "trap"},
}


@pytest.mark.parametrize(
    ("behaviour", "tokens", "events"),
    [
        pytest.param(Behaviour(events_at_once=4), 33, 33, marks=pytest.mark.slow),
        (Behaviour(event_tokens=4), 36, 9),
    ],
    ids=["bursts", "trap_6"],
)
def test_tokens_of_a_step_are_counted_and_timed_the_same_in_one_event_and_in_several(
    tmp_path, behaviour, tokens, events
):
    with trap_server(behaviour) as url:
        result = measure(BenchConfig(**LOAD, output_tokens=str(tokens)), Target(url), tmp_path / "r")

    summary = summarize(result)
    metrics = summary["metrics"]
    assert {(record.output_tokens, record.events) for record in measured(result)} == {(tokens, events)}
    # A token takes 20 ms, and longer on a busy machine. Counted by events it would take 5 or 80 ms.
    tpot_s = metrics["tpot_s"]["mean"]
    assert 0.019 < tpot_s < 0.06
    assert metrics["itl_s"]["mean"] == pytest.approx(tpot_s, rel=0.02)
    assert 0.01 < metrics["itl_s"]["percentiles"]["p50"]["value"] < 0.06
    if behaviour.events_at_once > 1:
        # The first token is alone, then come eight bursts of four.
        assert summary["client"]["burst_events"] == pytest.approx(33 / 9, rel=0.05)
        assert summary["client"]["burst_interval_s"] == pytest.approx(4 * tpot_s, rel=0.1)
