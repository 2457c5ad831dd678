import pytest

from loadgen import workload
from loadgen.config import BenchConfig
from loadgen.datasets.prompt import Limits
from loadgen.datasets.vocabulary import calibrate

VOCABULARY = calibrate(lambda text: 1 + len(text.split()))


@pytest.mark.parametrize(
    "load",
    [
        {"mode": "poisson", "rate": 20, "duration": 2},
        {"mode": "gamma", "rate": 20, "burstiness": 0.5, "duration": 2, "workload": "shared_prefix"},
        {"mode": "sessions", "rate": 20, "duration": 2, "workload": "multi_turn"},
        {"mode": "poisson", "rate": 20, "duration": 2, "workload": "shared_prefix", "prefix_cache": "cold"},
    ],
)
def test_one_seed_is_one_load_and_another_seed_another(load):
    first, again, other = (workload.build(BenchConfig(**load, seed=seed), VOCABULARY, Limits()) for seed in (3, 3, 4))

    assert first.first(30) == again.first(30)
    assert (first.digest, first.schedule_hash) == (again.digest, again.schedule_hash)
    assert first.digest != other.digest
    assert first.schedule_hash != other.schedule_hash
    assert [prompt.text for prompt in first.first(30)] != [prompt.text for prompt in other.first(30)]


def test_what_is_scheduled_are_the_first_turns_of_sessions():
    load = BenchConfig(mode="sessions", rate=20, duration=1, warmup=0, workload="multi_turn", turns="3")

    made = workload.build(load, VOCABULARY, Limits())

    assert len(made.scheduled()) == len(made.times_ns)
    assert {prompt.turn for prompt in made.scheduled()} == {0}
