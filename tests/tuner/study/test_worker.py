"""A study with a proposer: its launches, its predictions, and its order of finalists."""

import math
from dataclasses import dataclass, replace

import pytest

from tests.tuner.studies import SETUP, FormulaServer, open_search
from tuner.config import TuneConfig
from tuner.proposers.proposal import Decline, Proposal
from tuner.study.open_search import make_search
from tuner.study.search_worker import run_search
from tuner.trial.outcome import MeasuredAttempt

BUDGETS = (1024, 2048, 4096)


@dataclass
class Scripted:
    """Proposes budgets in order, then reports that it is done; ranks measured trials by budget, largest first."""

    left: list[int]
    is_done: bool = True

    def propose(self, _results, _running):
        if not self.left:
            return Decline("nothing is left", is_done=self.is_done)
        settings = {"max_batch_prefill_tokens": self.left.pop(0), "cuda_memory_fraction": 0.9, "prefill_chunking": True}
        return Proposal(
            settings, {"by_simulator": True, "expected_gain": 0.25, "predicted_output_tokens_per_s": 1000.0}
        )

    def best_first(self, results):
        measured = [each.settings for each in results if each.number > 0]
        return sorted(measured, key=lambda settings: -(settings.get("max_batch_prefill_tokens") or 0))


def proposed(tmp_path, *, is_done: bool = True):
    search = open_search(tmp_path / "s", FormulaServer(), sampler="random", trials=6)
    search = replace(search, proposer=Scripted(list(BUDGETS), is_done))
    return search, run_search(search)


def test_a_result_has_the_predictions_of_its_proposal(tmp_path):
    _, results = proposed(tmp_path)

    found = [each for each in results if each.origin == "simulator"]
    assert [each.settings["max_batch_prefill_tokens"] for each in found] == [*BUDGETS]
    assert all(each.attributes == {"expected_gain": 0.25, "predicted_output_tokens_per_s": 1000.0} for each in found)


def test_trust_W15_a_pooled_trial_has_the_means_of_all_its_runs(tmp_path):
    runs = iter(
        [(100.0, 9.0, 10.0), (130.0, 3.0, 20.0), (160.0, 12.0, 12.0)]
    )  # the last value of no metric is its mean

    def evaluate(settings, _setup, directory):
        tokens, requests, error_rate = (
            next(runs) if settings.get("max_batch_prefill_tokens") == 1024 else (50.0, 1.0, 40.0)
        )
        (directory / "run").mkdir(parents=True)
        rates = {"output_tokens_per_s": tokens, "requests_per_s": requests, "error_rate": error_rate}
        found = {name: {"value": value} for name, value in rates.items()}
        return MeasuredAttempt(directory / "run", {"rates": found, "metrics": {}})

    content = {
        "study": {"trials": 4, "noise_runs": 0, "simulator": "off", "sampler": "random"},
        "server": {"fixed": {"max_input_tokens": 512, "max_total_tokens": 544, "quantize": "eetq"}},
        "objective": {
            "maximize": ["output_tokens_per_s", "requests_per_s"],
            "limit": [{"metric": "error_rate", "max": 10.0}],
        },
    }
    search = make_search(tmp_path / "s", TuneConfig.model_validate(content), SETUP, evaluate)

    results = run_search(replace(search, proposer=Scripted([1024] * 3)))
    pooled = [each for each in results if each.settings.get("max_batch_prefill_tokens") == 1024][-1]

    assert (pooled.value, pooled.second, pooled.count) == pytest.approx((130.0, 8.0, 3))
    assert pooled.measured["output_tokens_per_s"] == pytest.approx(130.0)
    assert pooled.measured["requests_per_s"] == pytest.approx(8.0)
    assert pooled.measured["error_rate"] == pytest.approx(14.0)
    assert pooled.violations["error_rate <= 10"] == pytest.approx(math.log(2 * 1.2) / 3)


def test_a_proposer_that_is_done_ends_the_search_and_ranks_the_finalists(tmp_path):
    search, results = proposed(tmp_path)

    assert len(results) == 1 + len(BUDGETS)
    assert [each.settings["max_batch_prefill_tokens"] for each in search.finalists(results)] == [4096, 2048, 1024]


def test_after_a_decline_the_sampler_continues_and_measured_values_decide(tmp_path):
    search, results = proposed(tmp_path, is_done=False)

    assert len(results) == 6
    finalists = search.finalists(results)
    assert [each.value for each in finalists] == sorted((each.value for each in finalists), reverse=True)
    assert search.files.notes()["declined"] == "nothing is left"
