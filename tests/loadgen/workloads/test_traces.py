import itertools

import pytest

from loadgen.errors import UsageError
from loadgen.workloads.prompts.prompt import ClipCount, ServerLimits
from loadgen.workloads.prompts.vocabulary import calibrate
from loadgen.workloads.traces import (
    LengthRange,
    RowChoice,
    TracePrompts,
    TraceRow,
    read_azure,
    read_burstgpt,
    read_mooncake,
)

# In the formats of the public traces.
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1758, "output_length": 500, "hash_ids": [0, 1, 2, 3]}
{"timestamp": 3000, "input_length": 1322, "output_length": 490, "hash_ids": [0, 14, 15]}
"""


def words(text: str) -> int:
    return 1 + len(text.split())


def test_azure_rows_have_times_to_the_nanosecond(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)

    first, second = read_azure(file, RowChoice(limit=2))

    assert second.arrival_ns - first.arrival_ns == 4_314_579_000
    assert (first.input_tokens, first.output_tokens) == (374, 44)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column 'TIMESTAMP'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", ":2: `TIMESTAMP` is 'yesterday'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,x,2\n", ":2: `ContextTokens` is 'x'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,3,0\n", "`GeneratedTokens` is 0, below 1"),
    ],
)
def test_a_wrong_azure_file_is_refused_by_line_and_column(tmp_path, text, message):
    file = tmp_path / "trace.csv"
    file.write_text(text)

    with pytest.raises(UsageError) as refused:
        read_azure(file)

    assert message in str(refused.value)


def test_a_wrong_mooncake_line_is_refused_by_number(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}\n{"timestamp": 3}\n')

    with pytest.raises(UsageError, match=r":2: no key 'input_length'"):
        read_mooncake(file)


def test_equal_hashes_give_equal_text():
    rows = [
        TraceRow(0, 1_300, 5, (7, 8, 9)),
        TraceRow(1, 1_100, 5, (7, 8, 10)),
        TraceRow(2, 700, 5, (7, 11)),
    ]
    trace = TracePrompts("mooncake", rows, calibrate(words), ServerLimits(), seed=3, text_key="3")

    texts = [prompt.text.split() for prompt in trace]

    assert [len(text) + 1 for text in texts] == [1_300, 1_100, 700]
    shared_block = 1 + 512
    assert texts[0][:shared_block] == texts[1][:shared_block] == texts[2][:shared_block]
    assert texts[0][: shared_block + 512] == texts[1][: shared_block + 512]
    assert texts[0][: shared_block + 100] != texts[2][: shared_block + 100]


def test_lengths_are_clipped_to_the_limits_and_counted():
    rows = [TraceRow(0, 900, 300), TraceRow(1, 100, 50), TraceRow(2, 5_000, 50)]
    trace = TracePrompts("azure_llm", rows, calibrate(words), ServerLimits(1_000, 1_100), seed=3, text_key="3")
    clipped = ClipCount()

    prompts = list(trace)
    for prompt in prompts:
        clipped.add(prompt)

    assert [(prompt.input_tokens, prompt.output_tokens) for prompt in prompts] == [(800, 300), (100, 50), (1_000, 50)]
    assert [words(prompt.text) for prompt in prompts] == [800, 100, 1_000]
    assert [prompt.planned_input_tokens for prompt in prompts] == [900, 100, 5_000]
    assert clipped.to_json() == {"requests": 2, "input_tokens": 100 + 4_000, "output_tokens": 0}


def test_mooncake_rows_have_milliseconds_lengths_and_block_hashes(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)

    rows = read_mooncake(file)

    assert rows == [TraceRow(0, 1_758, 500, (0, 1, 2, 3)), TraceRow(3 * 10**9, 1_322, 490, (0, 14, 15))]


def test_burstgpt_rows_without_an_answer_are_skipped(tmp_path):
    file = tmp_path / "burst.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    file.write_text(header + "5,ChatGPT,472,18,490,API log\n45.5,ChatGPT,10,0,10,API log\n118,GPT-4,1087,230,1317,x\n")

    rows = read_burstgpt(file)

    assert [(row.arrival_ns, row.input_tokens, row.output_tokens) for row in rows] == [
        (5_000_000_000, 472, 18),
        (118_000_000_000, 1_087, 230),
    ]
    file.write_text(header + "yesterday,m,1,2,3,x\n")
    with pytest.raises(UsageError, match="`Timestamp` is 'yesterday'"):
        read_burstgpt(file)


def test_metrics_9_rows_of_burstgpt_are_filtered_by_model_log_type_and_length(tmp_path):
    file = tmp_path / "burst.csv"
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = (
        "5,1,2,ChatGPT,472,18,490,API log",
        "6,1,2,GPT-4,40,20,60,API log",
        "7,2,1,GPT-4,90,30,120,Conversation log",
    )
    file.write_text(header + "\n".join((*rows, "8,2,1,GPT-4,500,30,530,API log")) + "\n")

    def arrivals(**choice):
        return [row.arrival_ns // 10**9 for row in read_burstgpt(file, RowChoice(**choice))]

    assert arrivals() == [5, 6, 7, 8]
    assert arrivals(models=("GPT-4",)) == [6, 7, 8]
    assert arrivals(models=("GPT-4",), log_types=("API log",)) == [6, 8]
    assert arrivals(input_tokens=LengthRange(None, 100), output_tokens=LengthRange(20)) == [6, 7]
    assert arrivals(skip=1, limit=2) == [6, 7]
    with pytest.raises(UsageError, match="none passes the filters"):
        arrivals(models=("Llama",))


def test_a_trace_that_loops_continues_with_different_texts():
    rows = [TraceRow(0, 20, 3), TraceRow(1, 30, 4)]
    trace = TracePrompts("azure_llm", rows, calibrate(words), ServerLimits(), seed=3, text_key="3", loops=True)

    prompts = list(itertools.islice(trace, 5))

    assert [prompt.input_tokens for prompt in prompts] == [20, 30, 20, 30, 20]
    assert len({prompt.text for prompt in prompts}) == 5
    assert len({prompt.prompt_id for prompt in prompts}) == 5


def test_the_size_of_a_block_is_a_setting_of_the_trace():
    rows = [TraceRow(0, 60, 1, (1, 2)), TraceRow(1, 60, 1, (1, 3))]
    trace = TracePrompts("mooncake", rows, calibrate(words), ServerLimits(), seed=3, text_key="3", block_tokens=16)

    first, second = (prompt.text.split() for prompt in trace)

    assert first[:17] == second[:17]
    assert first[:34] != second[:34]
