import itertools

import pytest

from loadgen.datasets.lengths import Lengths
from loadgen.datasets.prompt import Limits
from loadgen.datasets.prompts import Columns, PromptFile, read_prompts, shuffled
from loadgen.errors import UsageError


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
        ('{"messages": [{"role": 1}]}', "a message needs `role` and `content`"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    file = tmp_path / "a.jsonl"
    file.write_text(text)

    with pytest.raises(UsageError) as refused:
        read_prompts(file)

    assert message in str(refused.value)


def test_prompts_come_again_from_the_top_with_ids_of_their_own(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("one\ntwo\n")
    prompts = PromptFile("mine", read_prompts(file), Lengths.parse("16"), Limits(None, 10), seed=0)

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


def test_a_length_that_is_none_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "one", "n": "many"}')

    with pytest.raises(UsageError, match="`n` is 'many'"):
        read_prompts(tmp_path / "a.jsonl", Columns("q", "n"))


def test_a_shuffled_file_has_every_prompt_once_in_an_order_of_the_seed(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"prompt {number}" for number in range(30)))
    rows = read_prompts(tmp_path / "a.txt")

    assert shuffled(rows, 1) == shuffled(rows, 1) != shuffled(rows, 2)
    assert sorted(row.text for row in shuffled(rows, 1)) == sorted(row.text for row in rows)
