"""The facts of a run's setup."""

from reports.document import Facts, Table
from reports.metrics.summary import Analysis
from reports.pages.sections.facts import facts_of_runs, load_sentence, run_facts, start_time
from reports.run_store import RunManifest, RunResult


def facts_of(manifest: RunManifest) -> dict[str, str]:
    groups = run_facts(Analysis.of(RunResult(manifest, []))).groups
    return {name: value for _, facts in groups for name, value in facts}


def test_engine_of_the_bundled_server_is_listed() -> None:
    engine = {
        "dtype": "bfloat16",
        "quantize": "fp8",
        "backend": "cpu",
        "attention": {"prefill": "torch"},
        "tuned": "chat",
    }
    found = facts_of(RunManifest("r", target={"info": {"model_id": "m", "sha": "0" * 40, "engine": engine}}))

    assert found["model"] == "m"
    assert found["precision"] == "bfloat16, fp8"
    assert found["device"] == "cpu"
    assert found["attention"] == "prefill: torch"
    assert found["version"] == "000000000000"
    assert found["tuned"] == "chat"


def test_trace_and_clipping_are_listed() -> None:
    config = {"trace_file": "conv.csv", "trace_limit": 200, "time_scale": 0.05}
    clipped = {"requests": 3, "input_tokens": 1200, "output_tokens": 34}
    found = facts_of(RunManifest("r", mode="trace", config=config, clipped=clipped))

    assert found["trace"] == "conv.csv, first 200 requests, times × 0.05"
    assert found["clipped"] == "3 requests, 1,234 tokens"


def test_trust_3a_the_source_of_the_times_is_a_fact() -> None:
    counts = {"stamped": 996, "unstamped": 1, "rejected": 3}
    kernel = facts_of(RunManifest("r", arrival_times={"source": "kernel", **counts}))
    read = facts_of(RunManifest("r", arrival_times={"source": "read", **counts, "stamped": 0}))

    assert kernel["arrival times"] == "kernel timestamps for 99.6 % of the reads, 3 rejected (clock step)"
    assert read["arrival times"] == "time of the read; the system has no arrival times"


def test_unknown_facts_are_left_out() -> None:
    found = facts_of(RunManifest("r"))

    assert "model" not in found
    assert found["clipped"] == "none"


def test_common_facts_are_listed_once_and_differences_in_a_table() -> None:
    runs = [
        Analysis.of(RunResult(RunManifest("r", label=label, mode="closed", config={"concurrency": users}), []))
        for label, users in (("a", 1), ("b", 16))
    ]

    shared, apart = facts_of_runs(runs)

    assert isinstance(shared, Facts)
    assert ("clipped", "none") in dict(shared.groups)["Load"]
    assert isinstance(apart, Table)
    assert apart.frame.to_dict("records") == [
        {"run": "a", "mode": "closed loop, 1 user"},
        {"run": "b", "mode": "closed loop, 16 users"},
    ]
    assert facts_of_runs(runs[:1]) == (run_facts(runs[0]),)


def test_load_sentence() -> None:
    assert load_sentence(RunManifest("r", mode="closed", config={"concurrency": 16})) == "closed loop, 16 users"
    assert load_sentence(RunManifest("r", mode="poisson", config={"rate": 2.5})) == "open loop, poisson, 2.5 requests/s"


def test_start_time_has_minutes() -> None:
    assert start_time(RunManifest("r", started_at="2026-11-20T14:53:54.419+00:00")) == "2026-11-20 14:53 UTC"
    assert start_time(RunManifest("r", started_at="yesterday")) == "yesterday"
