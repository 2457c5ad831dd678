"""The kinds of servers: recognised by their replies; tokens counted and lengths forced in the form of each."""

from contextlib import closing
from pathlib import Path

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.dialects.dialect import Sampling
from loadgen.dialects.registry import DIALECTS
from loadgen.errors import UsageError
from loadgen.http.framing import NDJSON
from loadgen.preparation.length_check import length_estimate
from loadgen.preparation.prepare_run import make_vocabulary
from loadgen.preparation.token_counter import TokenCounter, open_counter
from loadgen.runner import measure
from loadgen.target.server_kind import KINDS, TokenizeRoute, detect
from loadgen.target.target import Target
from loadgen.workloads.prompts.vocabulary import Vocabulary, Word
from tests.support.servers.stream_server import Script, ServerState, stream_server

ROOT = Path(__file__).resolve().parents[3]
OWN_INFO = {"model_id": "m", "max_total_tokens": 9, "engine": {"extensions": []}}


@pytest.mark.parametrize(
    ("info", "models", "kind"),
    [
        (OWN_INFO, None, "own"),
        ({"model_id": "m", "max_total_tokens": 9}, None, "tgi"),
        (None, {"data": [{"id": "m", "owned_by": "vllm"}]}, "vllm"),
        (None, {"data": [{"id": "m", "owned_by": "sglang"}]}, "sglang"),
        ({"version": 1}, {"data": [{"id": "m", "owned_by": "llamacpp"}]}, "llamacpp"),
        (None, {"data": [{"id": "m", "owned_by": "tensorrt_llm"}]}, "trtllm"),
        (None, {"data": [{"id": "m", "owned_by": "organization"}]}, "openai"),
        (None, {"data": [{"id": "m", "owned_by": "library"}]}, "openai"),
        (None, {"data": []}, "openai"),
        (None, ["m"], "openai"),
    ],
)
def test_a_server_is_recognised_by_its_replies(info, models, kind):
    found = detect(info, models)

    assert found.kind is KINDS[kind]
    assert found.reason


@pytest.mark.parametrize(
    ("reply", "content", "count"),
    [
        ("", [1, 2, 3], 3),
        ("tokens", {"tokens": [1, 2]}, 2),
        ("count", {"count": 5, "tokens": None}, 5),
        ("count", {"error": "no"}, None),
        ("", {"tokens": [1]}, None),
        ("count", {"count": True}, None),
        ("", 4, None),
    ],
)
def test_a_reply_of_another_form_is_no_count(reply, content, count):
    assert TokenizeRoute("/tokenize", "prompt", reply, {}).count(content) == count


@pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp"])
def test_tokens_are_counted_in_the_form_of_the_server(owner):
    with stream_server(ServerState(has_info=False, owner=owner)) as (url, state):
        target = Target(url)
        facts = target.facts()
        with closing(target.control()) as control:
            count = open_counter(BenchConfig(), control, facts).count("three short words")

        assert (facts.kind.name, facts.detected_by) == (owner, f"/v1/models is owned by {owner}")
        assert count == 4
        assert {request["path"] for request in state.requests} == {"/tokenize"}


@pytest.mark.parametrize("api", ["openai-chat", "openai-completions"])
def test_without_a_route_tokens_are_counted_by_usage_with_few_requests(api):
    with stream_server(ServerState(has_info=False, has_tokenize=False)) as (url, state):
        target = Target(url)
        with closing(target.control()) as control:
            counter = open_counter(BenchConfig(), control, target.facts(api))
            vocabulary = make_vocabulary(counter)

        assert counter.is_costly
        assert len(vocabulary.write(50, "key").split()) == 49
        assert len(state.requests) <= 20


def test_lengths_that_no_tokenizer_counts_are_stated_as_estimated(tmp_path):
    with stream_server(ServerState(has_info=False, has_tokenize=False)) as (url, _):
        result = measure(BenchConfig(requests=1, concurrency=1, output_tokens="2"), Target(url), tmp_path / "r")

    assert result.manifest.target["prompt_lengths"] == "estimated (±1 %, measured on 2 texts)"


@pytest.mark.parametrize(("factor", "percent"), [(1.0, 1), (1.1, 11), (0.8, 21)])
def test_an_estimate_states_the_error_of_texts_that_were_counted(factor, percent):
    vocabulary = Vocabulary(0, (Word("a", 1),), (Word(" b", 1),), " b")

    def count(text):
        return round(factor * len(text.split()))

    counted = TokenCounter(count, "usage of responses", is_costly=True)

    assert length_estimate(counted, vocabulary, "key") == f"estimated (±{percent} %, measured on 2 texts)"
    assert length_estimate(TokenCounter(count, "file"), vocabulary, "key") is None


def test_a_server_that_counts_nothing_needs_a_tokenizer():

    refused = Script(status=400, body=b'{"error":"x"}', content_type="application/json")
    with stream_server(ServerState(has_info=False, has_tokenize=False, script=lambda _: refused)) as (url, _):
        target = Target(url)
        with closing(target.control()) as control:
            counter = open_counter(BenchConfig(), control, target.facts())
            with pytest.raises(UsageError, match=r"does not count tokens .*--tokenizer"):
                make_vocabulary(counter)


def test_the_kind_can_be_given():
    with stream_server(ServerState(has_info=False)) as (url, _):
        assert Target(url).facts(engine="vllm").kind is KINDS["vllm"]


def test_the_url_of_the_api_is_that_of_the_server():
    with stream_server(ServerState(has_info=False, owner="vllm")) as (url, _):
        assert Target(f"{url}/v1").facts().kind is KINDS["vllm"]


@pytest.mark.parametrize(
    ("models", "version", "kind"),
    [
        (None, {"version": "0.13.1"}, "ollama"),
        ({"data": [{"id": "m", "owned_by": "library"}]}, {"version": "0.13.1"}, "ollama"),
        ({"data": [{"id": "m", "owned_by": "sglang"}]}, {"version": "0.13.1"}, "sglang"),
        ({"data": [{"id": "m"}]}, {"version": 3}, "openai"),
    ],
)
def test_ollama_is_recognised_by_its_version_if_no_other_kind_is(models, version, kind):
    assert detect(None, models, version).kind is KINDS[kind]


def test_the_page_of_servers_states_each_api():
    rows = {}
    for line in (ROOT / "docs" / "servers.md").read_text().splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if line.startswith("| `") and name.strip("`") in DIALECTS:
            rows[name.strip("`")] = cells

    assert rows.keys() == DIALECTS.keys()
    for name, open_dialect in DIALECTS.items():
        dialect = open_dialect(Sampling())
        route, stream, forced, template = rows[name]
        assert route.startswith(f"`{dialect.path}`")
        assert stream == ("NDJSON" if dialect.framing is NDJSON else "SSE")
        assert (forced, template) == tuple(
            "yes" if each else "no" for each in (dialect.can_force_length, dialect.has_template)
        )


def test_the_page_of_servers_states_each_kind():
    rows = {}
    for line in (ROOT / "docs" / "servers.md").read_text().splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if line.startswith("| `") and name.strip("`") in KINDS and len(cells) == 4 and name.strip("`") not in rows:
            rows[name.strip("`")] = cells

    assert rows.keys() == KINDS.keys()
    for name, kind in KINDS.items():
        _, length, counted, metrics = rows[name]
        assert length == (", ".join(f"`{field}`" for field in kind.length_fields) or "not possible")
        assert counted == (f"`{kind.tokenize.path}`" if kind.tokenize else "`usage` of responses")
        on = "none" if name == "ollama" else "on"
        assert metrics == (f"`{kind.metrics_flag}`" if kind.metrics_flag else on)
