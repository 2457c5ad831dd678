import json

import pytest

from tests.tuner.studies import FormulaServer, open_search
from tuner.errors import CannotMeasureError, SpaceError, StudyError
from tuner.search import best_of, resolved


def test_the_defaults_come_first_and_count(tmp_path):
    server = FormulaServer()

    results = open_search(tmp_path / "s", server).run()

    assert len(results) == len(server.launches) == 8
    assert results[0].settings == {"model_id": "preset:tiny-llama", "max_input_tokens": 512, "max_total_tokens": 544}
    assert server.launches[0].max_batch_prefill_tokens is None
    assert all(result.number == number for number, result in enumerate(results))


def test_dead_configurations_are_results_and_the_search_goes_on(tmp_path):
    results = open_search(tmp_path / "s", FormulaServer(dies_above=0.8), trials=12).run()

    dead = [result for result in results if result.outcome == "infeasible"]
    assert dead
    assert {result.cause for result in dead} == {"memory"}
    assert len(results) == 12
    assert best_of(results)


def test_the_same_study_continues_and_adds_no_launch_when_it_is_done(tmp_path):
    first = FormulaServer()
    done = open_search(tmp_path / "s", first).run()

    again = FormulaServer()
    assert open_search(tmp_path / "s", again).run() == done
    assert again.launches == []


@pytest.mark.parametrize("interrupt_at", [1, 2, 5])
def test_an_interrupted_study_loses_no_result_and_repeats_none(tmp_path, interrupt_at):
    interrupted = FormulaServer(interrupt_at=interrupt_at)
    with pytest.raises(KeyboardInterrupt):
        open_search(tmp_path / "s", interrupted).run()

    resumed = FormulaServer()
    results = open_search(tmp_path / "s", resumed).run()

    assert len(results) == 8
    assert len(interrupted.launches) - 1 + len(resumed.launches) == 8


def test_a_result_that_was_written_and_never_told_is_told_on_continuing(tmp_path, monkeypatch):
    search = open_search(tmp_path / "s", FormulaServer(), trials=3)
    search.run()
    told = []
    monkeypatch.setattr("tuner.study.Study.tell", lambda self, trial, result: told.append(result.number))

    def died(self):
        return [type("Trial", (), {"number": json.loads(path.read_text())["asked"]}) for path in settings]

    settings = [tmp_path / "s" / "trials" / "0002" / "settings.json"]
    monkeypatch.setattr("tuner.study.Study.unfinished", died)
    search.run()

    assert told == [2]


def test_one_fault_of_the_generator_is_tried_again_and_several_end_the_search(tmp_path):
    assert len(open_search(tmp_path / "once", FormulaServer(faults=1)).run()) == 8

    with pytest.raises(CannotMeasureError, match="disk is full"):
        open_search(tmp_path / "always", FormulaServer(faults=99)).run()


def test_a_folder_of_another_study_is_refused(tmp_path):
    open_search(tmp_path / "s", FormulaServer())
    (tmp_path / "s" / "study.json").write_text(json.dumps({"digest": "another"}))

    with pytest.raises(StudyError, match="another space or load"):
        open_search(tmp_path / "s", FormulaServer())


def test_settings_that_no_launcher_takes_are_refused_before_the_first_launch(tmp_path):
    search = open_search(tmp_path / "s", FormulaServer())
    config = search.config.model_copy(
        update={"server": search.config.server.model_copy(update={"fixed": {"max_inputs": 3}})}
    )

    with pytest.raises(SpaceError, match="max_inputs"):
        type(search).open(tmp_path / "t", config, search.bench)


def test_a_knob_with_one_value_is_named_and_not_searched(tmp_path):
    search = open_search(tmp_path / "s", FormulaServer())

    assert "quantize" in search.cannot_act
    assert "quantize" not in {parameter.name for parameter in search.space.parameters}


def test_a_budget_below_the_longest_prompt_is_raised_only_where_prompts_are_not_chunked():
    settings = {"max_input_tokens": 512, "max_batch_prefill_tokens": 64}

    assert resolved({**settings, "prefill_chunking": False})["max_batch_prefill_tokens"] == 512
    assert resolved({**settings, "prefill_chunking": True})["max_batch_prefill_tokens"] == 64
