"""The lines that a study shows: the place of each launch in its series, and the gain so far."""

import io
import re
from dataclasses import replace

from loadgen.progress import SilentProgress, open_progress
from tests.tuner.studies import SETUP, FormulaServer, open_search
from tuner.study.artefacts import write_artefacts
from tuner.study.confirmation import confirm
from tuner.study.search_worker import run_search


class Placed(SilentProgress):
    """Keeps the places and the messages."""

    def __init__(self):
        self.lines = []
        self.messages = []

    def place(self, position):
        self.lines.append(str(position or ""))

    def show(self, text):
        self.messages.append(text)


def placed(folder, **study):
    progress = Placed()
    search = open_search(folder, FormulaServer(), setup=replace(SETUP, progress=progress), **study)
    return search, progress


def test_pages_2_a_launch_of_a_study_has_its_number_and_the_best_gain_so_far(tmp_path):
    search, progress = placed(tmp_path / "s", trials=5, noise_runs=2)

    with search:
        search.measure_noise()
        run_search(search)

    assert progress.lines[:2] == ["noise 1 of 2", "noise 2 of 2"]
    assert progress.lines[2] == "launch 1 of 5"
    launches = [line for line in progress.lines if line.startswith("launch")]
    assert [line.partition(",")[0] for line in launches] == [f"launch {number} of 5" for number in range(1, 6)]
    gains = [int(re.search(r"best so far ([+-]\d+) %", line)[1]) for line in launches[2:]]
    assert gains == sorted(gains)
    assert progress.lines[-1] == ""


def test_pages_2_a_confirming_launch_has_its_number_of_all(tmp_path):
    search, progress = placed(tmp_path / "s", trials=4)
    results = run_search(search)
    progress.lines.clear()

    confirm(search, results[0], search.finalists(results)[:2], rounds=3)

    assert progress.lines == [f"confirmation {number} of 9" for number in range(1, 10)]


def test_pages_2_the_lines_of_a_launch_in_a_pipe_begin_with_its_place(tmp_path):
    stream = io.StringIO()
    progress = open_progress(stream)
    search = open_search(tmp_path / "s", FormulaServer(), setup=replace(SETUP, progress=progress))

    search.place_launch("trial")
    progress.update({"t_s": 5.0, "phase": "measure", "in_flight": 4, "completed": 9, "failed": 0, "tokens_out": 288})

    assert stream.getvalue().startswith("launch 1 of 8: 5 s measure, 4 running, 9 done, 0 failed, 58 tokens/s")


def test_pages_2_files_that_are_not_written_are_named_once_with_their_reason(tmp_path):
    """A preset of the package cannot be loaded by a real TGI."""
    search, progress = placed(tmp_path / "s", trials=4)
    results = run_search(search)
    confirmation = confirm(search, results[0], search.finalists(results)[:1], rounds=3)
    progress.messages.clear()

    write_artefacts(search, results, confirmation, is_confirmed=True)

    assert progress.messages == [
        "not written: run-tgi-docker.sh and k8s.yaml. `model_id` is preset:tiny-llama, a preset of this package, which "
        "TGI cannot load: tune a model of the hub"
    ]
