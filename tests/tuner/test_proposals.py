"""What a study does with a proposer: its launches, its promises, and its word on who is best."""

from dataclasses import dataclass, replace

from tests.tuner.studies import FormulaServer, open_search
from tuner.proposals import Proposal, StepBack

BUDGETS = (1024, 2048, 4096)


@dataclass
class Scripted:
    """Proposes budgets in order, then says that it is done; ranks what was measured by budget, largest first."""

    left: list[int]
    is_done: bool = True

    def propose(self, _results, _running):
        if not self.left:
            return StepBack("nothing is left", is_done=self.is_done)
        settings = {"max_batch_prefill_tokens": self.left.pop(0), "cuda_memory_fraction": 0.9, "prefill_chunking": True}
        return Proposal(settings, {"guide": True, "expected_gain": 0.25, "predicted_output_tokens_per_s": 1000.0})

    def best_first(self, results):
        measured = [each.settings for each in results if each.number > 0]
        return sorted(measured, key=lambda settings: -(settings.get("max_batch_prefill_tokens") or 0))


def proposed(tmp_path, *, is_done: bool = True):
    search = open_search(tmp_path / "s", FormulaServer(), sampler="random", trials=6)
    search = replace(search, proposer=Scripted(list(BUDGETS), is_done))
    return search, search.run()


def test_a_launch_keeps_what_was_promised_of_it(tmp_path):
    _, results = proposed(tmp_path)

    guided = [each for each in results if each.origin == "guide"]
    assert [each.settings["max_batch_prefill_tokens"] for each in guided] == [*BUDGETS]
    assert all(each.attributes == {"expected_gain": 0.25, "predicted_output_tokens_per_s": 1000.0} for each in guided)


def test_a_proposer_that_is_done_ends_the_search_and_names_the_finalists(tmp_path):
    search, results = proposed(tmp_path)

    assert len(results) == 1 + len(BUDGETS)
    assert [each.settings["max_batch_prefill_tokens"] for each in search.finalists(results)] == [4096, 2048, 1024]


def test_after_a_step_back_the_sampler_goes_on_and_measured_values_decide(tmp_path):
    search, results = proposed(tmp_path, is_done=False)

    assert len(results) == 6
    finalists = search.finalists(results)
    assert [each.value for each in finalists] == sorted((each.value for each in finalists), reverse=True)
    assert search.files.notes()["stepped_back"] == "nothing is left"
