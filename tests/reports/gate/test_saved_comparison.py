"""Only the runs inside the directory of a stored comparison are read: the file may come from elsewhere."""

import json
from pathlib import Path

import pytest

from reports.gate.compare import CompareOptions, judge
from reports.gate.saved_comparison import COMPARISON_FILE, comparison_json, load_comparison
from reports.gate.side_run import Pair, SideRun


def write_comparison(directory: Path, runs_a: list[Path], runs_b: list[Path]) -> None:
    values = {"output_tokens_per_s": 100.0}
    pairs = [Pair(SideRun("a", values), SideRun("b", values)) for _ in range(4)]
    comparison = judge(pairs, CompareOptions(gated=("output_tokens_per_s",), shown=()))
    directory.mkdir(exist_ok=True)
    content = comparison_json(comparison, ["tgi-bench compare"], runs_a, runs_b)
    (directory / COMPARISON_FILE).write_text(json.dumps(content))


def test_runs_inside_the_directory_are_found_also_after_it_was_moved(tmp_path: Path) -> None:
    (tmp_path / "moved/pair01-a").mkdir(parents=True)
    write_comparison(tmp_path / "moved", [tmp_path / "before/pair01-a"], [])

    saved = load_comparison(tmp_path / "moved")

    assert (saved.runs_a, saved.runs_b, saved.outside) == ((tmp_path / "moved/pair01-a",), (), ())


@pytest.mark.parametrize("name", ["{root}/secret", "../secret", "gate/..", "gate/.", "link"])
def test_runs_outside_the_directory_are_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate/link").symlink_to(tmp_path / "secret")
    outside = name.format(root=tmp_path)
    write_comparison(tmp_path / "gate", [], [Path(outside)])

    saved = load_comparison(tmp_path / "gate")

    assert (saved.runs_a, saved.runs_b) == ((), ())
    assert [str(Path(each)) for each in saved.outside] == [str(Path(outside))]
