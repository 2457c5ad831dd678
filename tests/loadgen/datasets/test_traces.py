import itertools
from pathlib import Path

import pytest

from loadgen.datasets.prompt import ClipCount, Limits
from loadgen.datasets.row_choice import LengthRange, RowChoice
from loadgen.datasets.traces import Trace, TraceRow, read_azure, read_burstgpt, read_mooncake
from loadgen.datasets.vocabulary import calibrate
from loadgen.errors import UsageError

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
AZURE = SHARED / "azure-llm-2023-conv.csv"
MOONCAKE = SHARED / "mooncake-conversation-4k.jsonl"


def words(text: str) -> int:
    return 1 + len(text.split())


def test_azure_rows_have_times_to_the_nanosecond(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )

    first, second = read_azure(file)

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
    trace = Trace("mooncake", rows, calibrate(words), Limits(), seed=3)

    texts = [prompt.text.split() for prompt in trace]

    assert [len(text) + 1 for text in texts] == [1_300, 1_100, 700]
    shared_block = 1 + 512
    assert texts[0][:shared_block] == texts[1][:shared_block] == texts[2][:shared_block]
    assert texts[0][: shared_block + 512] == texts[1][: shared_block + 512]
    assert texts[0][: shared_block + 100] != texts[2][: shared_block + 100]


def test_lengths_are_clipped_to_the_limits_and_counted():
    rows = [TraceRow(0, 900, 300), TraceRow(1, 100, 50), TraceRow(2, 5_000, 50)]
    trace = Trace("azure_llm", rows, calibrate(words), Limits(1_000, 1_100), seed=3)
    clipped = ClipCount()

    prompts = list(trace)
    for prompt in prompts:
        clipped.add(prompt)

    assert [(prompt.input_tokens, prompt.output_tokens) for prompt in prompts] == [(800, 300), (100, 50), (1_000, 50)]
    assert [words(prompt.text) for prompt in prompts] == [800, 100, 1_000]
    assert [prompt.planned_input_tokens for prompt in prompts] == [900, 100, 5_000]
    assert clipped.to_json() == {"requests": 2, "input_tokens": 100 + 4_000, "output_tokens": 0}


@pytest.mark.skipif(not AZURE.exists(), reason=f"{AZURE} is not there")
def test_the_azure_trace_reads_whole():
    rows = read_azure(AZURE)

    assert len(rows) == 19_366
    assert (rows[0].input_tokens, rows[0].output_tokens) == (374, 44)
    assert read_azure(AZURE, RowChoice(limit=200)) == rows[:200]


@pytest.mark.skipif(not MOONCAKE.exists(), reason=f"{MOONCAKE} is not there")
def test_the_mooncake_trace_reads_whole():
    rows = read_mooncake(MOONCAKE)

    assert len(rows) == 4_000
    assert rows[0].hash_ids == tuple(range(14))
    assert rows[0].input_tokens == 6_758


def test_burstgpt_rows_without_an_answer_are_left_out(tmp_path):
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


def test_metrics_9_rows_of_burstgpt_are_chosen_by_model_kind_and_length(tmp_path):
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
    with pytest.raises(UsageError, match="filters leave none"):
        arrivals(models=("Llama",))


def test_a_trace_that_loops_goes_on_with_other_texts():
    rows = [TraceRow(0, 20, 3), TraceRow(1, 30, 4)]
    trace = Trace("azure_llm", rows, calibrate(words), Limits(), seed=3, loops=True)

    prompts = list(itertools.islice(trace, 5))

    assert [prompt.input_tokens for prompt in prompts] == [20, 30, 20, 30, 20]
    assert len({prompt.text for prompt in prompts}) == 5
    assert len({prompt.prompt_id for prompt in prompts}) == 5


def test_the_size_of_a_block_is_the_traces_to_say():
    rows = [TraceRow(0, 60, 1, (1, 2)), TraceRow(1, 60, 1, (1, 3))]
    trace = Trace("mooncake", rows, calibrate(words), Limits(), seed=3, block_tokens=16)

    first, second = (prompt.text.split() for prompt in trace)

    assert first[:17] == second[:17]
    assert first[:34] != second[:34]
