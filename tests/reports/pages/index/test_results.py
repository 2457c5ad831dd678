"""The index of a folder: verdict and numbers of each kind of result, links, order, folders that cannot be read."""

import json
from pathlib import Path

import pytest

from loadgen.cli import main
from reports.gate.compare import judge
from reports.gate.comparison import CompareOptions
from reports.gate.saved_comparison import comparison_json
from reports.gate.side_run import Pair, SideRun
from reports.pages.index.page import build_index
from reports.pages.index.saved_results import saved_results
from reports.renderers.write import write_page

SUMMARY = {
    "verdict": {"status": "valid", "reasons": []},
    "counts": {"ok": 95, "overloaded": 5},
    "rates": {"output_tokens_per_s": {"value": 123.4}},
    "metrics": {"ttft_s": {"percentiles": {"p95": {"value": 0.025}}}},
}


def write_run(directory: Path, started_at: str, summary: object = SUMMARY, **fields: object) -> None:
    directory.mkdir(parents=True)
    manifest = {"run_id": directory.name, "schema_version": 1, "started_at": started_at, "slots": 16, **fields}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))


def write_series(directory: Path, **content: object) -> None:
    point = {"is_valid": True, "runs": ["run-1"], "metrics": {"output_tokens_per_s": 40.0, "ttft_p95_ms": 9.0}}
    points = [
        {**point, "load": 1.0},
        {**point, "load": 16.0, "metrics": {"output_tokens_per_s": 500.0, "ttft_p95_ms": 31.0}},
    ]
    write_run(directory / "run-1", "2026-11-20T13:00:00Z")
    series = {"quantity": "concurrency", "capacity": None, "highest_within": None, "points": points}
    (directory / "sweep.json").write_text(json.dumps(series | content))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    root = tmp_path / "my runs"
    write_run(root / "old", "2026-11-01T08:00:00Z", label="before")
    write_run(root / "more" / "new", "2026-11-21T10:30:00+02:00")
    (root / "old" / "report.html").write_text("")
    write_series(root / "a sweep")
    write_series(root / "search", capacity={"value": 41.0, "lo": 38.0, "hi": 43.0}, highest_within=16.0)
    pairs = [
        Pair(SideRun("x", {"tpot_p50_ms": 20.0}), SideRun("x", {"tpot_p50_ms": 20.0 * f}))
        for f in (1.2, 1.21, 1.19, 1.2, 1.22, 1.18)
    ]
    comparison = judge(pairs, CompareOptions(gated=("tpot_p50_ms",), shown=()))
    (root / "gate").mkdir()
    (root / "gate" / "comparison.json").write_text(json.dumps(comparison_json(comparison)))
    study = root / "studies" / "tuned"
    study.mkdir(parents=True)
    (study / "study.json").write_text("{}")
    verdict = {
        "winner": 7,
        "confirmed": True,
        "gain": [1.18, 1.12, 1.24],
        "objective": "output_tokens_per_s",
        "trials": 15,
    }
    (study / "verdict.json").write_text(json.dumps(verdict))
    write_run(root / "killed", "2026-11-02T08:00:00Z", summary=None)
    write_run(root / "damaged", "2026-11-03T08:00:00Z", summary={"verdict": {}})
    (root / "torn").mkdir()
    (root / "torn" / "manifest.json").write_text('{"run_id": ')
    (root / "empty").mkdir()
    (root / "loop").symlink_to(root, target_is_directory=True)
    return root


def test_pages_1_every_result_is_listed_with_its_verdict_load_and_numbers(results: Path) -> None:
    found = {each.path.relative_to(results).as_posix(): each for each in saved_results(results) if not each.problem}

    rows = {
        name: (each.kind, each.verdict, each.load, each.output_tokens_per_s, each.found) for name, each in found.items()
    }
    assert rows.pop("gate")[:2] == ("comparison", "regression")
    assert "TPOT p50: +" in found["gate"].found
    assert rows == {
        "old": ("run", "valid", "closed loop, 16 users", 123.4, "5 of 100 requests failed"),
        "more/new": ("run", "valid", "closed loop, 16 users", 123.4, "5 of 100 requests failed"),
        "a sweep": ("sweep", "valid", "1 to 16 users", 500.0, "at 16 users"),
        "search": ("search", "valid", "1 to 16 users", 500.0, "41 users (38–43) within objectives"),
        "studies/tuned": (
            "study",
            "change the settings",
            "",
            None,
            "Output tokens/s +18 % (+12 to +24), 15 launches",
        ),
    }
    assert found["old"].ttft_p95_ms == 25.0


def test_pages_1_folders_that_cannot_be_read_are_listed_with_the_reason(results: Path) -> None:
    problems = {each.path.name: each.problem for each in saved_results(results) if each.problem}

    assert problems.keys() == {"killed", "damaged", "torn", "empty"}
    assert "the run did not end; `tgi-bench report" in problems["killed"]
    assert "summary" in problems["damaged"] or "KeyError" in problems["damaged"]
    assert "not JSON" in problems["torn"]
    assert "no manifest.json" in problems["empty"]


def test_pages_1_the_newest_result_comes_first_and_names_link_to_pages(results: Path, capsys) -> None:
    order = [each.path.name for each in saved_results(results) if each.kind in ("run", "sweep") and not each.problem]
    assert order == ["new", "a sweep", "old"]

    assert main(["report", str(results)]) == 0

    page = (results / "index.html").read_text(encoding="utf-8")
    assert '<a href="old/report.html">' in page
    assert page.count("/report.html") == 1
    assert '<table class="sortable">' in page
    assert "4 folders could not be read" in page
    assert "index: " in capsys.readouterr().err


def test_pages_1_the_index_is_json_too(results: Path, tmp_path: Path, capsys) -> None:
    assert main(["report", str(results), "--out", str(tmp_path / "out"), "--json"]) == 0

    rows = {row["folder"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["old"]["output_tokens_per_s"] == 123.4
    assert rows["old"]["started"] == "2026-11-01T08:00:00+00:00"
    assert rows["torn"]["problem"]
    assert '<a href="../my%20runs/old/report.html">' in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_pages_1_a_folder_without_any_result_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "other" / "deeper").mkdir(parents=True)

    assert main(["report", str(tmp_path / "other")]) == 2
    assert "no folder below it is one" in capsys.readouterr().err


@pytest.mark.slow
def test_pages_1_a_thousand_folders_are_listed(tmp_path: Path) -> None:
    for number in range(1_000):
        write_run(tmp_path / f"run-{number:04d}", f"2026-11-20T{number // 60:02d}:{number % 60:02d}:00Z")

    results = saved_results(tmp_path)
    page = write_page(build_index(tmp_path, results), tmp_path / "index.html").read_text(encoding="utf-8")

    assert len(results) == 1_000
    assert page.count("<tr>") == 1_001
    assert page.index("run-0999") < page.index("run-0500") < page.index("run-0000")
