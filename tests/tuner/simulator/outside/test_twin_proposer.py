"""Studies of a profile's server, guided by its twin: predictions, proposals, the ledger, and declines by name."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.config.bench_config import BenchConfig
from tests.tuner.simulator.outside.synthetic_runs import COSTS
from tuner.config import ServerSection
from tuner.errors import CostModelError
from tuner.proposers.proposal import Decline, Proposal
from tuner.proposers.surrogate import SurrogateProposer
from tuner.servers.select import server_of
from tuner.simulator.fitting.cost_file import Costs
from tuner.simulator.load import load_of
from tuner.simulator.outside.designed_loads import designed_loads
from tuner.simulator.outside.fit_costs import OutsideFit, law_of
from tuner.simulator.outside.outside_costs import outside_costs
from tuner.simulator.outside.twin_costs import twin_costs
from tuner.simulator.outside.twin_proposer import TwinProposer
from tuner.simulator.simulated_metrics import metrics_of
from tuner.simulator.simulation import Simulation
from tuner.simulator.slot_replica import SlotRule
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace
from tuner.trial.objective import Limit, Objective
from tuner.trial.outcome import TrialResult

SERVER = server_of(ServerSection(profile="llamacpp"))
LOAD = BenchConfig(mode="closed", concurrency=16, requests=48, input_tokens="uniform:64,256", output_tokens="24")
# A long prefill step delays the rows that decode, so that a limit on TPOT bounds `batch`.
OBJECTIVE = Objective("output_tokens_per_s", (Limit("tpot_mean_ms", max=22.0), Limit("error_rate", max=0.01)))
SPACE = SearchSpace(
    (
        Parameter("parallel", "int", low=1, high=16, log=True),
        Parameter("batch", "choice", values=(64, 128, 256, 512, 1024)),
        Parameter("flash_attn", "choice", values=("on", "off")),
    )
)
DEFAULTS = {"parallel": 4, "batch": 1024, "flash_attn": "on"}
# The speed-up of a setting without a meaning, which the twin does not know.
HIDDEN = {"on": 1.0, "off": 1.06}


def costs_of(errors: float = 0.05, **changed: float) -> Costs:
    """The costs of a server that was calibrated with 4 slots."""
    known = {**COSTS, **changed}
    intervals = {name: (0.9 * value, 1.1 * value) for name, value in known.items()}
    medians = dict.fromkeys(("throughput", "ttft", "tpot"), (errors, 2 * errors))
    fit = OutsideFit(SlotRule(4, 1024), known, intervals, {}, medians, 8)
    return outside_costs(fit, designed_loads(16, 512), {"engine": "llamacpp"})


def twin(folder: Path, costs: Costs, objective: Objective = OBJECTIVE, space: SearchSpace = SPACE) -> TwinProposer:
    fallback = SurrogateProposer(space, {}, objective, SERVER)
    return TwinProposer(folder, costs, SERVER.meanings, SERVER, LOAD, space, {}, objective, fallback, jobs=1)


def true_metrics(settings: dict) -> dict[str, float]:
    """The server in virtual time: its law, and the hidden effect of `flash_attn`."""
    rule, speed = SlotRule(settings["parallel"], settings["batch"]), HIDDEN[settings["flash_attn"]]
    law = law_of({name: value / speed for name, value in COSTS.items()})
    load = load_of(LOAD, client=costs_of().client)
    simulated = Simulation(load, [(rule, law)], max_concurrent_requests=10**6).run()
    return {**metrics_of(simulated, ("output_tokens_per_s", "tpot_mean_ms")), "error_rate": 0.0}


def launched(number: int, settings: dict, attributes: dict, noise: float) -> TrialResult:
    rng = random.Random(f"{number}:{sorted(settings.items())}")
    measured = {name: value * rng.lognormvariate(0, noise) for name, value in true_metrics(settings).items()}
    violations = {str(limit): limit.violation(measured[limit.metric]) for limit in OBJECTIVE.limits}
    return TrialResult(
        number, settings, "measured", measured["output_tokens_per_s"], violations=violations, measured=measured,
        attributes={name: value for name, value in attributes.items() if name.startswith(("predicted_", "expected"))},
    )  # fmt: skip


def search(proposes: TwinProposer, launches: int, noise: float = 0.01) -> list[TrialResult]:
    results, settings, attributes = [], dict(DEFAULTS), {}
    for number in range(launches):
        results.append(launched(number, settings, attributes, noise))
        proposal = proposes.propose(results, [])
        if isinstance(proposal, Decline):
            break
        settings, attributes = dict(proposal.settings), dict(proposal.attributes)
    return results


def best_of_all() -> float:
    points = (
        {"parallel": slots, "batch": batch, "flash_attn": flash}
        for slots in range(1, 17)
        for batch in SPACE.parameters[1].values
        for flash in HIDDEN
    )
    found = [true_metrics(each) for each in points]
    return max(each["output_tokens_per_s"] for each in found if each["tpot_mean_ms"] <= 22.0)


@pytest.mark.slow
def test_servers_3_the_twin_finds_the_best_of_160_configurations_in_six_launches(tmp_path: Path):
    results = search(twin(tmp_path, costs_of()), 6)

    feasible = [each for each in results if true_metrics(dict(each.settings))["tpot_mean_ms"] <= 22.0]
    assert max(true_metrics(dict(each.settings))["output_tokens_per_s"] for each in feasible) >= 0.95 * best_of_all()
    assert true_metrics(DEFAULTS)["output_tokens_per_s"] < 0.8 * best_of_all()


def test_servers_3_every_proposal_has_its_prediction_in_the_ledger(tmp_path: Path):
    proposal = twin(tmp_path, costs_of()).propose([launched(0, DEFAULTS, {}, 0.0)], [])

    assert isinstance(proposal, Proposal)
    assert proposal.attributes["by_simulator"] is True
    predicted = proposal.attributes["predicted_output_tokens_per_s"]
    assert predicted == pytest.approx(true_metrics(dict(proposal.settings))["output_tokens_per_s"], rel=0.1)
    noted = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert noted["settings"] == dict(proposal.settings)
    assert (tmp_path / "cost.json").exists()


def test_a_setting_without_a_meaning_does_not_change_a_prediction_and_is_learned(tmp_path: Path):
    proposes = twin(tmp_path, costs_of())
    on, off = ({**DEFAULTS, "flash_attn": value} for value in HIDDEN)

    assert proposes.rule_of(on) == proposes.rule_of(off) == (("prefill_tokens", 1024), ("slots", 4))
    results = search(proposes, 8, noise=0.005)
    assert proposes.best_first(results)[0]["flash_attn"] == "off"


def test_servers_3_poor_costs_are_declined_by_name_and_a_model_of_the_results_continues(tmp_path: Path):
    answer = twin(tmp_path, costs_of(errors=0.2)).propose([launched(0, DEFAULTS, {}, 0.0)], [])

    assert isinstance(answer, Decline)
    assert not answer.is_done
    assert "the median error of held-out throughput is 20.0%, above 15%" in answer.reason
    assert isinstance(answer.successor, SurrogateProposer)


def test_servers_3_a_twin_of_another_law_is_declined_after_its_launches(tmp_path: Path):
    # Rows cost nothing and kv dominates: the predicted effect of slots and batch is far from the true one.
    wrong = costs_of(prefill=0.0, tokens=1.0, squares=0.0, decode=0.0, rows=1e8, kv=0.0)
    proposes = twin(tmp_path, wrong, replace(OBJECTIVE, limits=()))
    results = [
        launched(number, {"parallel": slots, "batch": batch, "flash_attn": "on"}, {}, 0.0)
        for number, (slots, batch) in enumerate(((1, 64), (2, 128), (4, 512), (8, 1024), (16, 256)))
    ]

    answer = proposes.propose(results, [])

    assert isinstance(answer, Decline)
    assert "the shape of `output_tokens_per_s` is predicted to" in answer.reason
    assert proposes.best_first(results) == proposes.fallback.best_first(results)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Objective("tokens_per_joule"), "`tokens_per_joule` is not simulated"),
        (Objective("output_tokens_per_s", second="ttft_p50_ms"), "the study has two objectives"),
    ],
)
def test_an_objective_that_is_not_simulated_is_declined_by_name(tmp_path: Path, objective: Objective, message: str):
    answer = twin(tmp_path, costs_of(), objective).propose([], [])

    assert isinstance(answer, Decline)
    assert message in answer.reason


def test_costs_of_another_server_or_for_other_settings_are_refused(tmp_path: Path):
    path = tmp_path / "cost.json"
    costs_of().write(path)

    with pytest.raises(CostModelError, match="has the costs of llamacpp, but the study's server is vllm"):
        twin_costs(path, server_of(ServerSection(profile="vllm")), ["max_num_seqs"])
    with pytest.raises(
        CostModelError, match=r"predicts `parallel`, `batch` of the profile, but the study searches `ubatch`"
    ):
        twin_costs(path, SERVER, ["ubatch"])
    path.write_text(json.dumps({"coefficients_ns": {"prefill": 1e7, "decode": 5e6}}))
    with pytest.raises(CostModelError, match="is not from client timings: create it with"):
        twin_costs(path, SERVER, ["parallel"])
