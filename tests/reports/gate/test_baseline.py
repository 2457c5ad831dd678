"""Named baselines: creation from runs, and reading of untrusted files."""

import dataclasses
import json
from pathlib import Path

import pytest

from reports.gate.baseline import BaselineError, bless, list_baselines, load_baseline, write_baseline
from reports.gate.stored import MIN_RUNS
from reports.run_store import CLIENT_FILE, load_manifest, write_manifest
from tests.support.samples.sample_run import SampleLoad, write_sample_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    load = SampleLoad(mode="closed", duration_s=12)
    found = []
    for number in range(5):
        write_sample_run(root / f"run{number}", load)
        manifest = load_manifest(root / f"run{number}")
        started = f"2026-01-01T00:0{5 - number}:00"
        write_manifest(root / f"run{number}", dataclasses.replace(manifest, run_id=f"r{number}", started_at=started))
        found.append(root / f"run{number}")
    return found


@pytest.fixture(scope="module")
def stored(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stored")
    write_baseline(directory, bless(runs, "main", "Ada", "release 1.0"))
    return directory


def test_a_baseline_records_author_reason_and_server_and_its_runs_in_order(stored: Path) -> None:
    baseline = load_baseline(stored, "main")

    assert (baseline.author, baseline.reason, len(baseline.runs)) == ("Ada", "release 1.0", 5)
    assert [run.run_id for run in baseline.runs] == ["r4", "r3", "r2", "r1", "r0"]
    assert baseline.load_hash == baseline.runs[0].identity["workload hash"]
    run = baseline.runs[0]
    assert run.metrics["tpot_p50_ms"] is not None
    assert run.metrics["output_tokens_per_s"] is not None
    assert set(run.sketch) == {"ttft", "tpot", "itl", "gap"}
    assert all(len(values) == len(baseline.percentiles) for values in run.sketch.values())
    assert all(list(values) == sorted(values) for values in run.sketch.values())
    assert run.counts["ok"] > 0
    assert baseline.side_runs[0].label == "main"


def test_a_baseline_is_replaced_only_on_request(stored: Path) -> None:
    again = load_baseline(stored, "main").model_copy(update={"author": "Bob"})

    with pytest.raises(BaselineError, match="replaced only on request"):
        write_baseline(stored, again)
    assert load_baseline(stored, "main").author == "Ada"
    assert [each.name for each in list_baselines(stored)] == ["main"]


@pytest.mark.slow
def test_trust_W7_overloaded_runs_are_refused_as_a_baseline(tmp_path: Path) -> None:
    for number in range(MIN_RUNS):
        write_sample_run(tmp_path / f"run{number}", SampleLoad(rate=6, slots=4, failure_share=0, seed=number))

    with pytest.raises(BaselineError, match=r"cannot be compared: overloaded: arrivals .*choose a lower rate"):
        bless(sorted(tmp_path.iterdir()), "main", "Ada", "because")


def test_too_few_runs_and_bad_names_are_refused(runs: list[Path]) -> None:
    with pytest.raises(BaselineError, match="4 runs were given but a baseline needs 5"):
        bless(runs[:4], "main", "Ada", "why")
    with pytest.raises(BaselineError, match="is not a baseline name"):
        bless(runs, "../main", "Ada", "why")


def test_unlike_runs_are_refused(runs: list[Path], tmp_path: Path) -> None:
    write_sample_run(tmp_path / "other", SampleLoad(mode="closed", duration_s=12))
    manifest = load_manifest(tmp_path / "other")
    write_manifest(tmp_path / "other", dataclasses.replace(manifest, workload_hash="another"))

    with pytest.raises(BaselineError, match="workload hash differs"):
        bless([*runs[:4], tmp_path / "other"], "main", "Ada", "why")


@pytest.mark.slow
def test_invalid_runs_are_refused(runs: list[Path], tmp_path: Path) -> None:
    write_sample_run(tmp_path / "killed", SampleLoad(mode="closed", duration_s=12))
    (tmp_path / "killed" / CLIENT_FILE).unlink()

    with pytest.raises(BaselineError, match="is invalid"):
        bless([*runs[:4], tmp_path / "killed"], "main", "Ada", "why")


FORGED = {
    "not json": "nonsense",
    "no object": "[]",
    "no runs": {"runs": []},
    "infinite": {"runs": [{"metrics": {"tpot_p50_ms": float("inf")}}]},
    "no author": {"author": ""},
    "newer": {"schema_version": 99},
}


@pytest.mark.parametrize("kind", FORGED)
def test_reliability_T54_a_forged_baseline_is_refused_with_its_path(stored: Path, tmp_path: Path, kind: str) -> None:
    change = FORGED[kind]
    content = json.loads((stored / "main.json").read_text())
    if isinstance(change, dict):
        first = change.get("runs", [None])
        merged = content["runs"][0] | first[0] if first and isinstance(first[0], dict) else None
        content |= change | ({"runs": [merged]} if merged else {})
        text = json.dumps(content)
    else:
        text = change
    (tmp_path / "main.json").write_text(text)

    with pytest.raises(BaselineError, match=r"main\.json"):
        load_baseline(tmp_path, "main")


def test_reliability_T54_a_huge_baseline_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "main.json").open("wb") as file:
        file.truncate(17 * 2**20)

    with pytest.raises(BaselineError, match="larger than the limit of 16 MiB"):
        load_baseline(tmp_path, "main")


def test_keys_of_later_versions_are_ignored(stored: Path, tmp_path: Path) -> None:
    content = json.loads((stored / "main.json").read_text()) | {"added_later": 1}
    (tmp_path / "main.json").write_text(json.dumps(content))

    assert load_baseline(tmp_path, "main").name == "main"
