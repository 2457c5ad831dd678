import itertools
import json

import pytest

from loadgen.errors import UsageError
from loadgen.workloads.lengths import Lengths
from loadgen.workloads.prompts.prompt import ServerLimits
from loadgen.workloads.prompts.prompts_file import Columns, FilePrompts, read_prompts, read_sharegpt, shuffled


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"prompt": "one"}\n\n{"text": "two"}\n'),
        ("a.csv", "id,prompt\n1,one\n2,two\n"),
        ("a.txt", "one\n\ntwo\n"),
    ],
)
def test_prompts_are_read_from_every_kind_of_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)

    rows = read_prompts(tmp_path / name)

    assert [row.text for row in rows] == ["one", "two"]


def test_messages_keep_their_roles(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}')

    (row,) = read_prompts(file)

    assert row.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    assert row.as_text() == "be brief\nhi"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts"),
        ("{", ":1: not JSON"),
        ("[1]", "neither a string nor an object"),
        ('{"q": "x"}', "none of prompt, text, inputs, messages"),
        ('{"messages": [{"role": 1}]}', "a message needs `role`, and `content`"),
        ('{"messages": [{"role": "user"}]}', "a message needs `role`, and `content`"),
        ('{"messages": [{"role": "user", "content": []}]}', "a message needs `role`, and `content`"),
        ('{"messages": "hi"}', "`messages` is not a list"),
        (
            '{"prompt": "x", "messages": [{"role": "user", "content": "y"}]}',
            "`prompt` cannot be sent: the prompt is in",
        ),
        ('{"prompt": "x", "stream": false}', "`stream` cannot be sent: --stream sets it"),
        ('{"prompt": "x", "n": 2}', "`n` cannot be sent"),
        ('{"prompt": "x", "max_tokens": 0}', "`max_tokens` is 0, not a number of tokens"),
        ('{"prompt": "x", "max_tokens": 1, "max_new_tokens": 2}', "both `max_tokens` and `max_new_tokens`"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    file = tmp_path / "a.jsonl"
    file.write_text(text)

    with pytest.raises(UsageError) as refused:
        read_prompts(file)

    assert message in str(refused.value)


def test_further_fields_of_a_row_are_kept_and_its_length_is_read(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"id": 7, "prompt": "one", "max_tokens": 5, "adapter_id": "a"}\n{"prompt": "two"}\n')

    rows = read_prompts(file)
    first, second = itertools.islice(FilePrompts("a", rows, Lengths.parse("9"), ServerLimits(), 0), 2)

    assert (first.fields, first.output_tokens) == ({"adapter_id": "a"}, 5)
    assert (second.fields, second.output_tokens) == ({}, 9)


def test_a_marker_stands_before_the_parts_of_a_message(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": [image, {"type": "text", "text": "hi"}]}]}))

    (row,) = read_prompts(file)

    assert row.as_text() == "hi"
    assert row.with_prefix("m ").messages[0]["content"] == [{"type": "text", "text": "m "}, *row.messages[0]["content"]]


def test_a_column_that_is_a_field_of_a_request_is_refused(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("prompt,temperature\none,0.5\n")

    with pytest.raises(UsageError, match="column `temperature` is a field of a request; use JSONL"):
        read_prompts(file)


def test_prompts_repeat_from_the_start_with_new_ids(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("one\ntwo\n")
    prompts = FilePrompts("mine", read_prompts(file), Lengths.parse("16"), ServerLimits(None, 10), seed=0)

    first = list(itertools.islice(prompts, 3))

    assert [prompt.text for prompt in first] == ["one", "two", "one"]
    assert [prompt.prompt_id for prompt in first] == ["mine-0", "mine-1", "mine-2"]
    assert [(prompt.planned_output_tokens, prompt.output_tokens) for prompt in first] == [(16, 9)] * 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"q": "one", "n": 5}\n{"q": "two", "n": null}\n'),
        ("a.csv", "q,prompt,n\none,other,5\ntwo,other,\n"),
    ],
)
def test_metrics_9_columns_are_mapped(tmp_path, name, text):
    (tmp_path / name).write_text(text)

    rows = read_prompts(tmp_path / name, Columns("q", "n"))

    assert [(row.text, row.output_tokens) for row in rows] == [("one", 5), ("two", None)]
    with pytest.raises(UsageError, match="z"):
        read_prompts(tmp_path / name, Columns("z"))


def test_a_wrong_answer_length_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "one", "n": "many"}')

    with pytest.raises(UsageError, match="`n` is 'many'"):
        read_prompts(tmp_path / "a.jsonl", Columns("q", "n"))


def test_a_shuffled_file_has_every_prompt_once_in_an_order_from_the_seed(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"prompt {number}" for number in range(30)))
    rows = read_prompts(tmp_path / "a.txt")

    assert shuffled(rows, 1) == shuffled(rows, 1) != shuffled(rows, 2)
    assert sorted(row.text for row in shuffled(rows, 1)) == sorted(row.text for row in rows)


def conversation(*turns):
    return {"conversations": [{"from": who, "value": what} for who, what in turns]}


def test_questions_with_an_answer_are_read_from_sharegpt(tmp_path):
    file = tmp_path / "sharegpt.json"
    rows = [
        conversation(("human", "why"), ("gpt", "because of this"), ("human", "oh")),
        conversation(("gpt", "hello"), ("human", "hi")),
        conversation(("human", " "), ("gpt", "what")),
        conversation(("human", "alone")),
        conversation(("user", "how"), ("assistant", "so")),
        {"id": "no conversation"},
    ]
    file.write_text(json.dumps(rows))

    found = read_sharegpt(file)

    assert [(row.question, row.answer) for row in found] == [("why", "because of this"), ("how", "so")]
    assert len(read_sharegpt(file, limit=1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("{}", "not a list of conversations"), ("[]", "begins with a question and an answer")],
)
def test_a_wrong_sharegpt_file_is_refused(tmp_path, text, message):
    file = tmp_path / "sharegpt.json"
    file.write_text(text)

    with pytest.raises(UsageError, match=message):
        read_sharegpt(file)
