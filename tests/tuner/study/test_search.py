import pytest

from tests.tuner.studies import SETUP, FormulaServer, open_search
from tuner.config import ParamSection
from tuner.errors import CannotMeasureError, SpaceError, StudyError
from tuner.servers.tgi.settings import resolved
from tuner.study.open_search import make_search
from tuner.study.optuna_study import OptunaStudy
from tuner.study.search_worker import run_search
from tuner.study.study_folder import StudyFolder
from tuner.study.study_search import best_of
from tuner.trial.objective import Objective
from tuner.trial.outcome import Failed


def test_the_defaults_are_trial_0_and_count(tmp_path):
    server = FormulaServer()

    results = run_search(open_search(tmp_path / "s", server))

    assert len(results) == len(server.launches) == 8
    assert results[0].settings == {"model_id": "preset:tiny-llama", "max_input_tokens": 512, "max_total_tokens": 544}
    assert "max_batch_prefill_tokens" not in server.launches[0]
    assert all(result.number == number for number, result in enumerate(results))


def test_infeasible_configurations_are_results_and_the_search_continues(tmp_path):
    results = run_search(open_search(tmp_path / "s", FormulaServer(dies_above=0.88), trials=12))

    dead = [result for result in results if result.outcome == "infeasible"]
    assert dead
    assert {result.cause for result in dead} <= {"memory", "dominated"}
    assert sum(result.was_launched for result in results) == 12
    assert best_of(results, Objective("output_tokens_per_s"))


def test_the_same_study_continues_and_adds_no_launch_when_it_is_done(tmp_path):
    first = FormulaServer()
    done = run_search(open_search(tmp_path / "s", first))

    again = FormulaServer()
    assert run_search(open_search(tmp_path / "s", again)) == done
    assert again.launches == []


@pytest.mark.parametrize("interrupt_at", [1, 2, 5])
def test_an_interrupted_study_loses_no_result_and_repeats_none(tmp_path, interrupt_at):
    interrupted = FormulaServer(interrupt_at=interrupt_at)
    with pytest.raises(KeyboardInterrupt):
        run_search(open_search(tmp_path / "s", interrupted))

    resumed = FormulaServer()
    results = run_search(open_search(tmp_path / "s", resumed))

    assert len(results) == 8
    assert len(interrupted.launches) - 1 + len(resumed.launches) == 8


def test_a_written_result_reaches_the_sampler_when_the_study_continues(tmp_path, monkeypatch):
    tell = OptunaStudy.tell

    def dies_before_telling(study, trial, result, **how):
        if result.number == 8:
            raise SystemExit
        tell(study, trial, result, **how)

    monkeypatch.setattr(OptunaStudy, "tell", dies_before_telling)
    with pytest.raises(SystemExit):
        run_search(open_search(tmp_path / "s", FormulaServer(), trials=11))
    monkeypatch.setattr(OptunaStudy, "tell", tell)
    monkeypatch.setattr("tuner.study.optuna_study.is_alive", lambda lease: False)

    resumed = FormulaServer()
    results = run_search(open_search(tmp_path / "s", resumed, trials=11))

    assert len(results) == 11
    assert results[8].settings not in resumed.launches


def test_one_fault_is_retried_and_several_end_the_search(tmp_path):
    assert len(run_search(open_search(tmp_path / "once", FormulaServer(faults=1)))) == 8

    with pytest.raises(CannotMeasureError, match="disk is full"):
        run_search(open_search(tmp_path / "always", FormulaServer(faults=99)))


class UnsteadyServer(FormulaServer):
    """A server whose first runs of one configuration have no steady state, until the window is long enough."""

    def __init__(self, *, until_s=2.0, launches=None):
        super().__init__()
        self.until_s = until_s
        self.unsteady = launches
        self.durations = []

    def __call__(self, settings, setup, directory):
        self.durations.append(setup.load.duration)
        is_unsteady = setup.load.duration < self.until_s and len(self.durations) in (self.unsteady or (1, 2))
        if is_unsteady:
            return Failed("invalid run: no steady state", is_invalid=True, is_unsteady=True)
        return super().__call__(settings, setup, directory)


def test_a_run_without_a_steady_state_is_repeated_once_with_twice_the_length(tmp_path):
    server = UnsteadyServer(launches=(1,))

    results = run_search(open_search(tmp_path / "s", server))

    assert server.durations == [1.0, 2.0, *[1.0] * 7]
    assert [result.attributes.get("longer_run") for result in results] == ["duration = 2", *[None] * 7]


def test_a_noise_run_without_a_steady_state_is_left_out_with_a_remark(tmp_path):
    server = UnsteadyServer(until_s=99.0, launches=(1, 2))
    search = open_search(tmp_path / "s", server, noise_runs=3)

    results = run_search(search)

    assert len(results) == 8
    assert search.files.noise().runs == 2
    assert "no steady state" in search.files.notes()["left out, noise run 1: the defaults"]


def test_defaults_without_a_steady_state_end_the_study_with_the_value_to_set(tmp_path):
    with pytest.raises(CannotMeasureError) as refused:
        run_search(open_search(tmp_path / "s", UnsteadyServer(until_s=99.0, launches=range(1, 99))))

    assert str(refused.value) == (
        "invalid run: no steady state (duration = 2 too). Set `duration = 4` in [load] instead of `duration = 1`, "
        "or raise `warmup`"
    )


def test_an_invalid_noise_run_ends_the_study_with_a_remedy(tmp_path):
    def invalid(settings, setup, directory):
        return Failed("invalid run: no steady state", is_invalid=True)

    with pytest.raises(CannotMeasureError) as refused:
        open_search(tmp_path / "s", invalid, noise_runs=2).measure_noise()

    assert str(refused.value) == (
        "invalid run: no steady state. Raise `duration` or `warmup` in [load], or end other programs on this machine"
    )


def test_a_folder_of_another_study_is_refused(tmp_path):
    open_search(tmp_path / "s", FormulaServer())
    StudyFolder(tmp_path / "s").update("study.json", {"identity": {"space": "another"}})

    with pytest.raises(StudyError, match="another space and load"):
        open_search(tmp_path / "s", FormulaServer())


def test_invalid_fixed_settings_are_refused_before_the_first_launch(tmp_path):
    search = open_search(tmp_path / "s", FormulaServer())
    config = search.config.model_copy(
        update={"server": search.config.server.model_copy(update={"fixed": {"max_inputs": 3}})}
    )

    with pytest.raises(SpaceError, match="max_inputs"):
        make_search(tmp_path / "t", config, search.setup)


def test_a_parameter_with_one_value_is_reported_and_not_searched(tmp_path):
    config = open_search(tmp_path / "s", FormulaServer()).config
    params = {
        "quantize": ParamSection(type="choice", values=("none",)),
        "prefill_chunking": ParamSection(type="bool"),
    }
    search = make_search(tmp_path / "t", config.model_copy(update={"param": params}), SETUP)

    assert search.without_effect == {"quantize": "it has only one value here"}
    assert [parameter.name for parameter in search.space.parameters] == ["prefill_chunking"]


def test_the_prefill_budget_is_raised_to_the_longest_prompt_without_chunked_prefill():
    settings = {"max_input_tokens": 512, "max_batch_prefill_tokens": 64}

    assert resolved({**settings, "prefill_chunking": False})["max_batch_prefill_tokens"] == 512
    assert resolved({**settings, "prefill_chunking": True})["max_batch_prefill_tokens"] == 64


def test_results_of_another_study_are_reused_without_a_launch(tmp_path):
    run_search(open_search(tmp_path / "first", FormulaServer(), sampler="qmc"))

    server = FormulaServer()
    results = run_search(open_search(tmp_path / "second", server, sampler="qmc", reuse=True))

    reused = [result for result in results if result.origin == "reused"]
    assert reused
    assert {result.attributes["from"] for result in reused} == {"first"}
    assert sum(result.was_launched for result in results) == 8


def test_wider_ranges_continue_a_study_with_its_measurements(tmp_path):
    def narrowed(high):
        params = {"max_batch_prefill_tokens": ParamSection(type="int", low=64, high=high, multiple_of=64)}
        config = open_search(tmp_path / "other", FormulaServer(), sampler="tpe").config
        return make_search(tmp_path / "s", config.model_copy(update={"param": params}), SETUP, FormulaServer())

    first = run_search(narrowed(1024))
    again = narrowed(2048)
    results = run_search(again)

    assert [each.settings for each in results] == [each.settings for each in first]
    assert again.evaluate.launches == []


@pytest.mark.parametrize("sampler", ["tpe", "gp", "random", "qmc", "nsga2", "coordinate"])
def test_every_sampler_spends_the_budget(tmp_path, sampler):
    results = run_search(open_search(tmp_path / "s", FormulaServer(), trials=5, sampler=sampler))

    assert sum(result.was_launched for result in results) == 5


def test_a_grid_search_launches_every_combination_once(tmp_path):
    config = open_search(tmp_path / "other", FormulaServer(), sampler="grid", trials=20).config
    params = {
        "max_batch_prefill_tokens": ParamSection(type="choice", values=(64, 512)),
        "prefill_chunking": ParamSection(type="bool"),
    }
    server = FormulaServer()
    results = run_search(make_search(tmp_path / "s", config.model_copy(update={"param": params}), SETUP, server))

    searched = [each.settings for each in results if each.number]
    assert len(server.launches) >= 5
    assert {(each["max_batch_prefill_tokens"], each["prefill_chunking"]) for each in searched} == {
        (64, True),
        (512, False),
        (512, True),
    }
