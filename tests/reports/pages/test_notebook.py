"""The code of docs/notebook.md runs from top to bottom and draws its figures."""

import importlib
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from reports.metrics.finish_run import finish_run
from tests.support.samples.sample_run import SampleLoad, write_sample_run

PAGE = Path(__file__).parents[3] / "docs" / "notebook.md"


def test_code_of_the_page_runs_on_a_saved_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "runs" / "one"
    write_sample_run(directory, SampleLoad(duration_s=20))
    finish_run(directory)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}

    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), names)

    drawn = {name for name, value in names.items() if isinstance(value, Figure)}
    assert drawn == {"timeline", "ecdf", "slowest", "parts", "heat", "inside", "own"}
    assert (directory / "ttft.svg").exists()


def test_every_function_that_the_page_names_exists() -> None:
    rows = re.findall(r"^\|.*\| `([\w.]+)\.(\w+)` \| .*?`([\w.]+)\.(\w+)` \|", PAGE.read_text(), flags=re.MULTILINE)

    assert len(rows) == 9
    for plots, function, frames, frame in rows:
        assert callable(getattr(importlib.import_module(f"reports.plots.{plots}"), function))
        assert callable(getattr(importlib.import_module(f"reports.pages.{frames}"), frame))
