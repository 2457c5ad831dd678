import random

import pytest

from tuner.config import ForbidSection, ParamSection
from tuner.errors import SpaceError
from tuner.space.parameter import Parameter
from tuner.space.search_space import SearchSpace

KNOWN = frozenset(
    {"max_batch_prefill_tokens", "max_waiting_tokens", "prefill_chunking", "cuda_memory_fraction", "quantize"}
)


class SeededSuggester:
    """Draws uniformly, as a sampler's trial would."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.asked: list[str] = []

    def suggest_float(self, name, low, high, *, step=None, log=False):
        self.asked.append(name)
        return self._random.uniform(low, high)

    def suggest_categorical(self, name, choices):
        self.asked.append(name)
        return self._random.choice(choices)


def space(params, forbid=()):
    sections = {name: ParamSection(**section) for name, section in params.items()}
    return SearchSpace.of(sections, [ForbidSection(**{"if": text}) for text in forbid], KNOWN)


WAITING = {"type": "int", "low": 1, "high": 100, "log": True, "when": "not prefill_chunking"}


def test_a_conditional_parameter_is_suggested_only_if_its_condition_holds():
    searched = space({"max_waiting_tokens": WAITING, "prefill_chunking": {"type": "bool"}})

    for seed in range(20):
        values = searched.suggest(SeededSuggester(seed), {})

        assert ("max_waiting_tokens" in values) is (not values["prefill_chunking"])


def test_a_condition_may_read_a_fixed_setting():
    searched = space({"max_waiting_tokens": WAITING})

    assert searched.suggest(SeededSuggester(0), {"prefill_chunking": True}) == {}
    assert "max_waiting_tokens" in searched.suggest(SeededSuggester(0), {"prefill_chunking": False})


@pytest.mark.parametrize("seed", range(30))
def test_integers_are_multiples_within_their_range(seed):
    searched = space({"max_batch_prefill_tokens": {"type": "int", "low": 100, "high": 1000, "multiple_of": 64}})

    value = searched.suggest(SeededSuggester(seed), {})["max_batch_prefill_tokens"]

    assert value % 64 == 0
    assert 128 <= value <= 960


def test_a_range_counts_both_ends():
    assert Parameter("p", "int", low=64, high=4096, multiple_of=64).num_values == 64
    assert Parameter("p", "int", low=100, high=1000, multiple_of=64).num_values == 14
    assert Parameter("p", "float", low=0.5, high=1.0, step=0.1).num_values == 6


@pytest.mark.parametrize(("value", "rounded"), [(95, 64), (97, 128), (100, 128), (1, 64), (9999, 4096)])
def test_an_integer_is_rounded_to_the_nearest_multiple_in_its_range(value, rounded):
    assert Parameter("p", "int", low=64, high=4096, multiple_of=64).rounded(value) == rounded


def test_a_forbidden_combination_is_named():
    searched = space({}, forbid=["quantize == 'nf4' and max_batch_prefill_tokens > 16384"])

    assert searched.why_forbidden({"quantize": "nf4", "max_batch_prefill_tokens": 20000}) == (
        "quantize == 'nf4' and max_batch_prefill_tokens > 16384"
    )
    assert searched.why_forbidden({"quantize": "nf4", "max_batch_prefill_tokens": 4096}) is None
    assert searched.why_forbidden({"max_batch_prefill_tokens": 20000}) is None


def test_an_unknown_parameter_is_refused_by_name():
    with pytest.raises(SpaceError, match="`max_wating_tokens`"):
        space({"max_wating_tokens": {"type": "bool"}})


def test_a_condition_on_an_unknown_setting_is_refused():
    with pytest.raises(SpaceError, match="`chunking`"):
        space({"max_waiting_tokens": {**WAITING, "when": "not chunking"}})


def test_circular_conditions_are_refused():
    with pytest.raises(SpaceError, match="form a cycle"):
        space(
            {
                "prefill_chunking": {"type": "bool", "when": "quantize == 'a'"},
                "quantize": {"type": "choice", "values": ["a", "b"], "when": "prefill_chunking"},
            }
        )


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (Parameter("p", "choice", values=("none",)), True),
        (Parameter("p", "choice", values=("none", "fp8")), False),
        (Parameter("p", "int", low=64, high=100, multiple_of=64), True),
        (Parameter("p", "float", low=0.5, high=1.0), False),
        (Parameter("p", "bool"), False),
    ],
)
def test_a_parameter_with_one_value_left_cannot_vary(parameter, expected):
    assert parameter.cannot_vary is expected
