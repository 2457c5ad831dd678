from tests.tuner.studies import open_search
from tuner.config import ParamSection
from tuner.proposers.better_half import better_half
from tuner.servers.tgi.initial_design import initial_design
from tuner.space.search_space import SearchSpace
from tuner.study.search_worker import run_search
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

SPACE = SearchSpace.of(
    {
        "max_batch_prefill_tokens": ParamSection(type="int", low=64, high=4096, log=True, multiple_of=64),
        "cuda_memory_fraction": ParamSection(type="float", low=0.5, high=1.0),
        "quantize": ParamSection(type="choice", values=("none", "eetq", "fp8")),
    },
    [],
    frozenset({"max_batch_prefill_tokens", "cuda_memory_fraction", "quantize"}),
)


def move(number, quantize, value, violation=-0.5):
    outcome = "measured" if value else "infeasible"
    return TrialResult(number, {"quantize": quantize}, outcome, value=value, violations={"a <= 1": violation})


def test_the_initial_design_has_one_plain_configuration_for_each_quantize_value():
    moves = initial_design(SPACE, {"max_input_tokens": 512})

    assert [each["quantize"] for each in moves] == ["none", "eetq", "fp8"]
    assert {each["max_batch_prefill_tokens"] for each in moves} == {1024}
    assert {each["cuda_memory_fraction"] for each in moves} == {0.9}


def test_the_better_half_is_ordered_by_feasibility_objective_and_violation():
    moves = [move(1, "none", 10.0), move(2, "eetq", 90.0, violation=0.1), move(3, "fp8", 20.0), move(4, "x", None, 1.0)]

    assert better_half(moves, Objective("output_tokens_per_s"), "quantize") == ["fp8", "none"]
    assert better_half([move(1, "none", None, 1.0), *moves[1:2]], Objective("output_tokens_per_s"), "quantize") == [
        "eetq"
    ]


def test_a_dropped_value_is_not_searched_again(tmp_path):
    from tests.tuner.studies import FormulaServer

    server = FormulaServer()
    results = run_search(open_search(tmp_path / "s", server, trials=14))

    later = {result.settings.get("quantize") for result in results if result.origin == "sampler"}
    assert (
        len({result.settings["quantize"] for result in results if result.origin == "initial_design"})
        > 2 * len(later) - 2
    )
    assert results[0].origin == "baseline"
