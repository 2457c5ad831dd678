import json

import pytest

from loadgen.datasets.sharegpt import read_sharegpt
from loadgen.errors import UsageError


def said(*turns):
    return {"conversations": [{"from": who, "value": what} for who, what in turns]}


def test_questions_that_were_answered_are_read(tmp_path):
    file = tmp_path / "sharegpt.json"
    rows = [
        said(("human", "why"), ("gpt", "because of this"), ("human", "oh")),
        said(("gpt", "hello"), ("human", "hi")),
        said(("human", " "), ("gpt", "what")),
        said(("human", "alone")),
        said(("user", "how"), ("assistant", "so")),
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
def test_a_wrong_file_is_refused(tmp_path, text, message):
    file = tmp_path / "sharegpt.json"
    file.write_text(text)

    with pytest.raises(UsageError, match=message):
        read_sharegpt(file)
