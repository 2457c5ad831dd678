import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.config.bench_config import BenchConfig
from loadgen.generator.partition import Partition
from loadgen.workloads import arrivals, workload
from loadgen.workloads.prompts.prompt import Prompt, ServerLimits
from loadgen.workloads.prompts.vocabulary import calibrate


def count_words(text):
    return len(text.split()) + 1


def seats(count):
    return [Partition(index, count) for index in range(count)]


@pytest.mark.parametrize("count", [2, 3])
def test_the_union_of_all_workers_schedules_is_the_one_schedule(count):
    config = BenchConfig(mode="poisson", rate=50, duration=2, warmup=0, input_tokens="uniform:4,9", seed=3)
    work = workload.build(config, calibrate(count_words), ServerLimits())

    shares = [
        list(zip(partition.times(work.times_ns), itertools.islice(partition.prompts(work.prompts), 200), strict=False))
        for partition in seats(count)
    ]

    whole = list(zip(work.times_ns, work.scheduled(), strict=True))
    assert sorted(itertools.chain(*shares), key=lambda due: due[0]) == whole
    assert arrivals.schedule_hash([due for due, _ in whole]) == work.schedule_hash
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_turns_of_a_session_stay_with_one_worker():
    config = BenchConfig(mode="sessions", workload="multi_turn", rate=20, duration=1, warmup=0, turns="uniform:1,4")
    work = workload.build(config, calibrate(count_words), ServerLimits())
    first = work.first(60)

    shares = [list(partition.prompts(first)) for partition in seats(2)]

    owners = [{prompt.session_id for prompt in share} for share in shares]
    assert owners[0] & owners[1] == set()
    assert sorted(shares[0] + shares[1], key=first.index) == first


@given(total=st.integers(0, 500), count=st.integers(1, 20))
def test_shares_add_up_and_none_is_more_than_one_larger(total, count):
    shares = [partition.share_of(total) for partition in seats(count)]

    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert shares == [len(list(partition.times(range(total)))) for partition in seats(count)]
    prompts = [Prompt(str(number)) for number in range(total)]
    assert shares == [len(list(partition.prompts(prompts))) for partition in seats(count)]
