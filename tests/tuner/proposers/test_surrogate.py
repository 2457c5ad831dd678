"""The search of servers without step traces: it finds optima with few launches, within limits and rules."""

import math

import pytest

from tuner.config import ServerSection
from tuner.proposers.proposal import Decline, Proposal
from tuner.proposers.surrogate import NUM_INITIAL, SurrogateProposer
from tuner.servers.select import server_of
from tuner.space.configuration import key_of
from tuner.space.expression import parse
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace
from tuner.trial.objective import Limit, Objective
from tuner.trial.outcome import TrialResult

SPACE = SearchSpace(
    (
        Parameter("parallel", "int", low=1, high=64, log=True),
        Parameter("batch", "int", low=64, high=4096, log=True, multiple_of=64),
        Parameter("flash_attn", "choice", values=("auto", "on", "off")),
    )
)
LIMIT = Limit("ttft_p95_ms", max=100.0)


def proposer(space=SPACE, limits=(), **more):
    objective = Objective("output_tokens_per_s", limits)
    return SurrogateProposer(space, {}, objective, server_of(ServerSection(profile="llamacpp")), **more)


def rate(settings):
    """Best at 16 slots and a batch of 512 with flash attention."""
    slots, batch = math.log2(settings["parallel"]) - 4, math.log2(settings["batch"]) - 9
    return 1000 * math.exp(-0.1 * slots**2 - 0.05 * batch**2) * (1.2 if settings["flash_attn"] == "on" else 1.0)


def search(proposes, count, measure=rate, violation=lambda _: {}):
    results, settings = [], {"parallel": 4, "batch": 2048, "flash_attn": "auto"}
    for number in range(count):
        violations = violation(settings)
        results.append(TrialResult(number, dict(settings), "measured", value=measure(settings), violations=violations))
        proposal = proposes.propose(results, [])
        assert isinstance(proposal, Proposal)
        settings = proposal.settings
    return results


@pytest.mark.slow
def test_twenty_launches_find_the_optimum_of_a_space_of_half_a_million():
    results = search(proposer(), 20)

    assert max(each.value for each in results) > 0.93 * 1200
    assert len({key_of(each.settings) for each in results}) == 20
    best = proposer().best_first(results)[0]
    assert rate(best) > 0.93 * 1200


def test_the_next_proposal_depends_on_the_results_alone():
    results = search(proposer(), NUM_INITIAL + 2)

    assert proposer().propose(results, []) == proposer().propose(results, [])
    assert proposer(seed=1).propose(results, []) != proposer().propose(results[:NUM_INITIAL], [])


def test_proposals_meet_a_limit_that_the_best_values_miss():
    def ttft(settings):
        return {str(LIMIT): LIMIT.violation(10.0 * settings["parallel"])}

    results = search(proposer(limits=(LIMIT,)), 20, violation=ttft)

    feasible = [each for each in results[NUM_INITIAL:] if each.is_feasible]
    assert len(feasible) > 9
    assert max(each.settings["parallel"] for each in feasible) >= 8


def test_settings_that_failed_to_start_are_avoided():
    results, proposes = [], proposer()
    settings = {"parallel": 4, "batch": 2048, "flash_attn": "auto"}
    for number in range(20):
        is_dead = settings["flash_attn"] == "on"
        outcome = {"outcome": "infeasible", "phase": "launch", "cause": "crash"} if is_dead else {"outcome": "measured"}
        value = None if is_dead else rate(settings)
        results.append(TrialResult(number, dict(settings), value=value, **outcome))
        settings = proposes.propose(results, []).settings

    assert sum(each.outcome == "infeasible" for each in results[NUM_INITIAL:]) <= 5


def test_refused_measured_and_running_configurations_are_not_proposed():
    space = SearchSpace(
        (Parameter("parallel", "choice", values=(1, 2, 4)), Parameter("ubatch", "choice", values=(512, 4096))),
        (parse("parallel == 4"),),
    )
    one = TrialResult(0, {"parallel": 1, "ubatch": 512}, "measured", value=1.0)
    # The profile forbids a ubatch above the batch.
    proposes = proposer(space)

    assert proposes.propose([one], []) == Proposal({"parallel": 2, "ubatch": 512})
    assert isinstance(proposes.propose([one], [{"parallel": 2, "ubatch": 512}]), Decline)


def test_a_launch_with_a_high_value_by_chance_is_not_the_best():
    space = SearchSpace((Parameter("parallel", "int", low=1, high=64, log=True),))
    slots = [1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64]
    values = {each: 1000 * (1 + 0.05 * math.log2(each)) for each in slots} | {8: 1310.0}
    results = [
        TrialResult(number, {"parallel": each}, "measured", value=value)
        for number, (each, value) in enumerate(values.items())
    ]

    assert max(values, key=values.get) == 8
    assert proposer(space, noise=lambda _: 0.1).best_first(results)[0]["parallel"] >= 32


@pytest.mark.parametrize("sampler", ["auto", "tpe"])
def test_a_study_of_a_profile_uses_the_surrogate_and_its_plan_names_it(tmp_path, sampler):
    from tests.tuner.studies import SETUP
    from tuner.config import TuneConfig
    from tuner.study.open_search import make_search
    from tuner.study.study_plan import search_of

    section = {"server": {"profile": "llamacpp"}, "study": {"sampler": sampler}}
    config = TuneConfig.model_validate(section)
    search = make_search(tmp_path / "s", config, SETUP, lambda *_: None)

    assert isinstance(search.proposer, SurrogateProposer) is (sampler == "auto")
    assert ("no step times" in search_of(config)) is (sampler == "auto")
