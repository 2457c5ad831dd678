import itertools
from collections import Counter

import pytest

from loadgen.workloads.lengths import Independent, Lengths
from loadgen.workloads.prompts.installed import GeneratedLoad
from loadgen.workloads.prompts.prompt import ServerLimits
from loadgen.workloads.prompts.shared_prefix import SharedPrefix
from loadgen.workloads.prompts.vocabulary import calibrate


def words(text):
    return 1 + len(text.split())


def workload(*, num_groups=3, is_zipf=False, **changes):
    values = {
        "vocabulary": calibrate(words),
        "lengths": Independent(Lengths.parse("uniform:5,9"), Lengths.parse("4")),
        "limits": ServerLimits(),
        "seed": 1,
        "text_key": "1",
        "is_cold": False,
    }
    return SharedPrefix(GeneratedLoad(**values | changes), num_groups, 20, is_zipf)


def opening(prompt):
    return " ".join(prompt.text.split()[:19])


def test_prompts_have_the_length_they_were_planned_with():
    prompts = list(itertools.islice(workload(), 50))

    assert [words(prompt.text) for prompt in prompts] == [prompt.planned_input_tokens for prompt in prompts]
    assert {prompt.planned_input_tokens for prompt in prompts} == {25, 26, 27, 28, 29}
    assert len({prompt.text for prompt in prompts}) == 50


def test_there_are_as_many_prefixes_as_groups_and_warming_sends_each():
    shared = workload()

    openings = {opening(prompt) for prompt in itertools.islice(shared, 100)}

    assert openings == {prefix.text for prefix in shared.prefixes()}
    assert len(openings) == 3


@pytest.mark.parametrize(("is_zipf", "least", "most"), [(False, 0.28, 0.39), (True, 0.13, 0.6)])
def test_popularity_decides_how_often_a_group_is_drawn(is_zipf, least, most):
    counted = Counter(opening(prompt) for prompt in itertools.islice(workload(is_zipf=is_zipf), 900))

    shares = sorted(count / 900 for count in counted.values())

    assert least < shares[0] < shares[-1] < most
    assert (shares[-1] > 0.5) == is_zipf


def test_cold_prompts_share_no_prefix_and_keep_their_length():
    prompts = list(itertools.islice(workload(is_cold=True), 50))

    assert len({tuple(prompt.text.split()[:7]) for prompt in prompts}) == 50
    assert [words(prompt.text) for prompt in prompts] == [prompt.planned_input_tokens for prompt in prompts]


def test_a_prompt_over_the_limit_keeps_its_prefix():
    prompt = workload(limits=ServerLimits(max_input_tokens=22)).prompt(0)

    assert (prompt.planned_input_tokens > 22, prompt.input_tokens, words(prompt.text)) == (True, 22, 22)
    assert opening(prompt) == opening(workload().prompt(0))
