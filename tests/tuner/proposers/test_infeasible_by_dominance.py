import pytest

from tuner.config import ServerSection
from tuner.proposers.infeasible_by_dominance import dominance_of, is_launched_anyway
from tuner.servers.select import server_of
from tuner.trial.outcome import TrialResult

SERVER = server_of(ServerSection())


def settings(budget, fraction, quantize="none"):
    return {"max_batch_prefill_tokens": budget, "cuda_memory_fraction": fraction, "quantize": quantize}


def dead(number, cause, budget, fraction, **how):
    return TrialResult(number, settings(budget, fraction), "infeasible", phase="launch", cause=cause, **how)


@pytest.mark.parametrize(
    ("cause", "budget", "fraction", "is_dominated"),
    [
        ("memory", 2048, 0.9, True),
        ("memory", 4096, 0.95, True),
        ("memory", 4096, 0.85, False),
        ("memory", 1024, 0.95, False),
        ("no_cache", 4096, 0.8, True),
        ("no_cache", 4096, 0.95, False),
        ("crash", 4096, 0.95, False),
    ],
)
def test_a_configuration_that_needs_more_memory_than_a_failed_one_is_dominated(cause, budget, fraction, is_dominated):
    assert (dominance_of(settings(budget, fraction), [dead(1, cause, 2048, 0.9)], SERVER) is not None) is is_dominated


def test_dominance_does_not_extend_to_another_quantization():
    assert dominance_of(settings(4096, 1.0, "fp8"), [dead(1, "memory", 2048, 0.9)], SERVER) is None


def test_a_measured_dominated_configuration_ends_the_rule():
    survivor = TrialResult(2, settings(4096, 0.95), "measured", value=1.0, attributes={"dominated_by": 1})

    assert dominance_of(settings(4096, 0.95), [dead(1, "memory", 2048, 0.9), survivor], SERVER) is None


def test_every_tenth_dominated_configuration_is_launched():
    dominated = [dead(number, "dominated", 1, 1.0) for number in range(9)]

    assert is_launched_anyway(dominated)
    assert not is_launched_anyway(dominated[:8])


def test_a_setting_that_the_launcher_rejected_is_pruned():
    refused = dead(1, "flag", 2048, 0.9, log_tail="error: invalid value for '--quantize'")

    assert "rejects `quantize` none" in str(dominance_of(settings(64, 0.5), [refused], SERVER))
    assert dominance_of(settings(64, 0.5, "fp8"), [refused], SERVER) is None
