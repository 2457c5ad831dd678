"""The planned cached tokens of every workload, against texts whose sharing is counted."""

import itertools
from dataclasses import replace

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.workloads import workload
from loadgen.workloads.prompts.planned_cache import CacheFacts, planned, text_parts
from loadgen.workloads.prompts.prompt import Prompt, ServerLimits
from tests.loadgen.workloads.test_workload import VOCABULARY

FACTS = CacheFacts(VOCABULARY.special_tokens, VOCABULARY.special_tokens)


def plans(count: int, facts: CacheFacts = FACTS, **load) -> list[int]:
    work = workload.build(BenchConfig(**load), VOCABULARY, ServerLimits(), cache=facts)
    return [prompt.planned_cached_tokens for prompt in itertools.islice(work.planned(), count)]


def test_trust_W1_planned_share_of_generated_prompts_is_the_common_start_of_all_texts():
    assert plans(4, input_tokens="100") == [0] + [FACTS.shared_tokens] * 3
    by_chance = plans(300, replace(FACTS, words=256), input_tokens="100")
    assert max(by_chance) <= FACTS.shared_tokens + 3


def test_trust_W1_planned_share_of_a_shared_prefix_counts_from_its_second_request():
    load = {"workload": "shared_prefix", "prefix_groups": 1, "prefix_tokens": 40, "input_tokens": "10"}

    assert plans(3, **load) == [0, 40, 40]
    assert plans(3, prefix_cache="warm", **load) == [40, 40, 40]
    assert plans(3, prefix_cache="cold", **load) == [0] + [FACTS.shared_tokens] * 2


def test_trust_W1_planned_tokens_are_whole_blocks_of_the_server():
    load = {"workload": "shared_prefix", "prefix_groups": 1, "prefix_tokens": 40, "input_tokens": "10"}

    assert plans(2, replace(FACTS, block_tokens=16), **load) == [0, 32]


@pytest.mark.parametrize("assistant", ["scripted", "real"])
def test_trust_W1_planned_history_ends_with_the_last_question_or_the_last_real_answer(assistant):
    """Turns of 20 and 20: the prompt of turn 2 has two questions and two answers before its own question."""
    load = {"workload": "multi_turn", "turns": "3", "input_tokens": "20", "output_tokens": "20"}

    found = plans(3, assistant=assistant, **load)

    history = {"scripted": [0, 20, 60], "real": [0, 40, 80]}[assistant]
    assert found == history


def test_trust_W1_planned_rows_of_a_file_sent_again_are_known(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("Where is the station?\nHow do I get there on foot?\n")
    config = BenchConfig(workload="prompts", prompts_file=str(path), salt="mine")
    work = workload.build(config, None, ServerLimits(), cache=CacheFacts(shared_tokens=9))

    found = list(itertools.islice(work.planned(), 4))

    assert [prompt.planned_cached_tokens for prompt in found] == [0, 9, 9, 9]
    assert [prompt.planned_cached_share for prompt in found][2:] == [1.0, 1.0]
    assert 0 < found[1].planned_cached_share < 0.6  # the marker


def test_trust_W1_planned_rows_of_a_file_that_begin_alike_share_their_start():
    system = "You are a helpful assistant of a railway company. " * 8
    prompts = [Prompt("a", text=system + "Where?", parts=text_parts(system + "Where?"))]
    prompts += [Prompt("b", text=system + "How long?", parts=text_parts(system + "How long?"))]

    found = list(planned(prompts, CacheFacts()))

    assert found[1].planned_cached_share == pytest.approx(len(system) / len(system + "How long?"), abs=0.02)


def test_trust_W1_planned_blocks_of_a_trace_are_known_from_their_second_request(tmp_path):
    path = tmp_path / "trace.jsonl"
    row = '{{"timestamp": {at}, "input_length": 200, "output_length": 2, "hash_ids": {ids}}}\n'
    path.write_text(row.format(at=0, ids=[1, 2]) + row.format(at=10, ids=[1, 2]) + row.format(at=20, ids=[1, 3]))

    found = plans(3, workload="mooncake", mode="trace", trace_file=str(path), block_tokens=50)

    opener = VOCABULARY.shortest
    assert found == [0, opener + 100, opener + 50]
