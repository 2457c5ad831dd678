import json

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.workloads import workload, workload_files
from loadgen.workloads.prompts.prompt import ServerLimits
from loadgen.workloads.prompts.vocabulary import calibrate

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
def test_equal_seeds_give_equal_loads_and_different_seeds_different_ones(load):
    first, again, other = (
        workload.build(BenchConfig(**load, seed=seed), VOCABULARY, ServerLimits()) for seed in (3, 3, 4)
    )

    assert first.first(30) == again.first(30)
    assert (first.digest, first.schedule_hash) == (again.digest, again.schedule_hash)
    assert first.digest != other.digest
    assert first.schedule_hash != other.schedule_hash
    assert [prompt.text for prompt in first.first(30)] != [prompt.text for prompt in other.first(30)]


def test_only_the_first_turns_of_sessions_are_scheduled():
    load = BenchConfig(mode="sessions", rate=20, duration=1, warmup=0, workload="multi_turn", turns="3")

    made = workload.build(load, VOCABULARY, ServerLimits())

    assert len(made.scheduled()) == len(made.times_ns)
    assert {prompt.turn for prompt in made.scheduled()} == {0}


def test_sharegpt_rows_are_filtered_by_length(tmp_path):
    file = tmp_path / "chats.json"
    talks = [("one two", "a b c"), ("one", "a"), ("one two three four", "a b c d e")]
    file.write_text(
        json.dumps([{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in talks])
    )
    load = BenchConfig(workload="sharegpt", prompts_file=str(file), min_output_tokens=2, max_input_tokens=4)

    lengths = workload_files.answer_lengths(load, lambda text: len(text.split()))
    made = workload.build(load, None, ServerLimits(), lengths)

    assert lengths == [3, None, 5]
    assert [(prompt.text, prompt.output_tokens) for prompt in made.first(2)] == [
        ("one two", 3),
        ("one two three four", 5),
    ]


def test_joint_lengths_reach_the_prompts(tmp_path):
    file = tmp_path / "pairs.csv"
    file.write_text("12,3\n40,9\n")

    made = workload.build(BenchConfig(length_pairs=str(file)), VOCABULARY, ServerLimits())

    assert {(prompt.input_tokens, prompt.output_tokens) for prompt in made.first(40)} == {(12, 3), (40, 9)}
    with pytest.raises(UsageError, match="length_pairs"):
        workload.build(BenchConfig(length_pairs="/nowhere.csv"), VOCABULARY, ServerLimits())


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"trace_model": ("GPT-4",)}, "`trace_model` .* applies to burstgpt"),
        ({"min_input_tokens": 4}, "`min_input_tokens` is 4 but workload is 'synthetic'; it applies to azure_llm"),
        ({"length_pairs": "x", "input_tokens": "5"}, "excludes"),
        ({"prompts_order": "shuffled"}, "reads no prompts"),
        ({"workload": "burstgpt", "trace_file": "x", "trace_loop": True}, "never ends by itself"),
        (
            {"workload": "burstgpt", "trace_file": "x", "min_input_tokens": 9, "max_input_tokens": 3},
            "`min_input_tokens` is 9 but `max_input_tokens` is 3",
        ),
    ],
)
def test_settings_of_other_workloads_are_refused(load, message):
    with pytest.raises(ValueError, match=message):
        BenchConfig(**load)
