"""Fields of the rows of a prompts file: sent as they are, or refused by name before the load."""

import json

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.runner import measure
from loadgen.target.target import Target
from tests.support.servers.stream_server import stream_server

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT = [{"type": "text", "text": "hi"}]


def sent(folder, row, api, **settings):
    """The body of the request of one row."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    load = {"workload": "prompts", "prompts_file": str(path), "requests": 1, "concurrency": 1, "salt": "off"}
    with stream_server() as (url, state):
        measure(BenchConfig(**load, api=api, **settings), Target(url), folder / "run")
    return [request["body"] for request in state.requests if request["body"].get("stream", True)][-1]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "tool_choice": "auto"},
            marks=pytest.mark.slow,
        ),
        {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}, "stop": ["x"]},
        pytest.param(
            {"messages": [{"role": "user", "content": TEXT}], "temperature": 0.5, "model": "adapter"},
            marks=pytest.mark.slow,
        ),
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "4"},
            ]
        },
    ],
)
def test_fields_and_messages_of_a_row_reach_the_chat_route_unchanged(tmp_path, row):
    body = sent(tmp_path, row | {"max_tokens": 3}, "openai-chat")

    assert {name: body[name] for name in row} == row
    assert body["max_tokens"] == 3


def test_fields_of_a_row_are_parameters_of_tgi(tmp_path):
    parameters = sent(tmp_path, {"inputs": "hi", "adapter_id": "a", "max_new_tokens": 3}, "tgi")["parameters"]

    assert (parameters["adapter_id"], parameters["max_new_tokens"]) == ("a", 3)


@pytest.mark.parametrize(
    ("api", "row", "refused"),
    [
        ("tgi", {"prompt": "hi", "tools": [TOOL]}, "`tools`"),
        ("tgi", {"prompt": "hi", "logit_bias": {}}, "`logit_bias`"),
        ("openai-completions", {"prompt": "hi", "tools": [TOOL]}, "`tools`"),
        ("tgi", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a message with `image_url`"),
        (
            "openai-completions",
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            "`tool_calls` of a message",
        ),
    ],
)
def test_a_field_that_the_api_lacks_is_refused_by_name(tmp_path, api, row, refused):
    with pytest.raises(UsageError, match=f"prompt 1 of 'rows' has {refused}, which API '{api}' does not take"):
        sent(tmp_path, row, api)
