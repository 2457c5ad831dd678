"""Bad input: each request is refused, and the server stays healthy and answers the next good request."""

import json
from typing import Any

import pytest

from reference_server.errors import ShardError
from reference_server.router.server_info import Platforms
from tests.support.servers.serving import Served, serve
from tests.support.wire.scripted_shard import ScriptedShard

USER = {"role": "user", "content": "hi"}
INFER = "/v2/models/m/versions/1/infer"
GOOD: dict[str, dict[str, Any]] = {
    "/": {"inputs": "a"},
    "/generate": {"inputs": "a"},
    "/generate_stream": {"inputs": "a"},
    "/tokenize": {"inputs": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [USER]},
    "/chat_tokenize": {"messages": [USER]},
    "/invocations": {"prompt": "a"},
    "/vertex": {"instances": [{"inputs": "a"}]},
    INFER: {
        "id": "1",
        "inputs": [{"name": "i", "shape": [1], "datatype": "BYTES", "data": [97]}],
        "outputs": [{"name": "o"}],
    },
}
BODIES: list[tuple[str, bytes, set[int]]] = [
    ("19_empty", b"", {400}),
    ("19_truncated", b'{"inputs":', {400}),
    ("19_trailing_comma", b'{"inputs":"a",}', {400}),
    ("19_single_quotes", b"{'inputs':'a'}", {400}),
    ("19_comment", b'{"inputs":"a"/**/}', {400}),
    ("20_null", b"null", {422}),
    ("20_number", b"5", {422}),
    ("20_string", b'"a"', {422}),
    ("21_utf8", b'{"inputs":"\xff"}', {400}),
    ("21_surrogate", b'{"inputs":"\\ud800"}', {400}),
    ("21_surrogate_key", b'{"\\ud800":1}', {400}),
    ("22_nan", b'{"inputs":NaN}', {400}),
    ("22_infinity", b'{"x":-Infinity}', {400}),
    ("23_huge", b'{"x":1e999}', {400, 422}),
    ("26_depth", b'{"x":' + b"[" * 129 + b"]" * 129 + b"}", {400}),
    ("26_deep_lists", b"[" * 100_000 + b"]" * 100_000, {400}),
    ("26_deep_objects", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, {400}),
    ("27_over", b" " * 2_000_001, {413}),
]


async def serves_on(served: Served) -> bool:
    answer = await served.generate("good", max_new_tokens=1)
    return answer.status_code == 200 and (await served.client.get("/health")).status_code == 200


async def test_reliability_4_2_undecodable_bodies_on_every_route():
    found: dict[str, int] = {}
    async with serve(facts={"platforms": Platforms(kserve=True)}) as served:
        for path in GOOD:
            for name, body, statuses in BODIES:
                answer = await served.client.post(path, content=body, headers={"content-type": "application/json"})
                if answer.status_code not in statuses or set(answer.json()) != {"error", "error_type"}:
                    found[f"{path} {name}"] = answer.status_code

        assert await serves_on(served)
    assert found == {}


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_reliability_4_2_28_other_content_types(content_type: str | None):
    headers = {} if content_type is None else {"content-type": content_type}
    async with serve(facts={"platforms": Platforms(kserve=True)}) as served:
        statuses = {
            (await served.client.post(path, content=json.dumps(body), headers=headers)).status_code
            for path, body in GOOD.items()
        }

    assert statuses == {415}


@pytest.mark.parametrize("content_type", ["application/x+json", "application/json; charset=utf-8"])
async def test_reliability_4_2_29_spellings_of_json(content_type: str):
    async with serve(facts={"platforms": Platforms(kserve=True)}) as served:
        statuses = {
            (
                await served.client.post(path, content=json.dumps(body), headers={"content-type": content_type})
            ).status_code
            for path, body in GOOD.items()
        }

    assert statuses == {200}


CASES: list[tuple[str, str, Any, set[int], str]] = [
    ("25_twice", "/generate", b'{"inputs":"a","inputs":"b"}', {422}, "duplicate field `inputs`"),
    ("25_alias", "/v1/chat/completions", {"messages": [USER], "tools": [
        {"type": "f", "function": {"name": "a", "parameters": {}, "arguments": {}}}]}, {422}, "duplicate"),
    ("31_marks", "/generate", {"inputs": "\0 \ue000 \u202e \U000e0001 x"}, {200, 422}, ""),
    ("36_infinite_in_single", "/generate", {"inputs": "a", "parameters": {"temperature": 1e39}}, {422}, "temperature"),
    ("37_tokens", "/generate", {"inputs": "a " * 1100}, {422}, "tokens"),
    ("37_one_word", "/generate", {"inputs": "a" * 1_900_000, "parameters": {"max_new_tokens": 1}}, {200, 422}, ""),
    ("38_best_of", "/generate", {"inputs": "a", "parameters": {"best_of": 10**6}}, {422}, "best_of"),
    ("39_stops", "/generate", {"inputs": "a", "parameters": {"stop": ["x"] * 100}}, {422}, "stop"),
    ("39_long_stop", "/generate", {"inputs": "a", "parameters": {"stop": ["x" * 1025]}}, {422}, "stop"),
    ("40_top_n", "/generate", {"inputs": "a", "parameters": {"top_n_tokens": 1000}}, {422}, "top_n_tokens"),
    ("40_truncate", "/generate", {"inputs": "a", "parameters": {"truncate": 0}}, {422}, "truncate"),
    ("41_adapter", "/generate", {"inputs": "a", "parameters": {"adapter_id": "nobody"}}, {200}, ""),
    ("41_long_adapter", "/generate", {"inputs": "a", "parameters": {"adapter_id": "x" * 257}}, {422}, "adapter_id"),
    ("42_image", "/generate", {"inputs": "![](http://h/i.png)", "parameters": {"max_new_tokens": 1}}, {200}, ""),
    ("45_messages", "/v1/chat/completions", {"messages": {}}, {422}, "messages"),
    ("45_part", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, {422}, "type"),
    ("46_none", "/v1/chat/completions", {"messages": []}, {200, 422}, ""),
    ("46_many", "/v1/chat/completions", {"messages": [USER] * 20_000}, {200, 422}, ""),
    ("46_role", "/v1/chat/completions", {"messages": [{"role": "r" * 160_000, "content": ""}]}, {422}, "role"),
    ("50_unknown", "/v1/chat/completions", {"messages": [USER], "tools": [
        {"type": "f", "function": {"name": "a"}}], "tool_choice": "b"}, {422}, "Tool with name b not found"),
    ("50_number", "/v1/chat/completions", {"messages": [USER], "tool_choice": 5}, {422}, "tool_choice"),
    ("51_many_tools", "/v1/chat/completions", {"messages": [USER], "tools": [
        {"type": "f", "function": {"name": str(i)}} for i in range(1000)]}, {422}, "tools"),
    ("51_nameless", "/v1/chat/completions", {"messages": [USER], "tools": [
        {"type": "f", "function": {}}]}, {422}, "name"),
    ("53_n", "/v1/chat/completions", {"messages": [USER], "n": 10**9}, {422}, "`n`"),
    ("53_bias", "/v1/completions", {"prompt": "a", "logit_bias": {
        str(i): 1 for i in range(10**5)}}, {422}, "logit_bias"),
    ("64_prompts", "/v1/completions", {"prompt": ["a"] * 10_000}, {422}, "batch size"),
    ("64_empty", "/v1/completions", {"prompt": []}, {422}, "prompt"),
    ("64_ids", "/v1/completions", {"prompt": [1, 2]}, {422}, "prompt"),
    ("64_mixed", "/v1/completions", {"prompt": ["a", 2]}, {422}, "prompt"),
    ("65_tokenize", "/tokenize", {"inputs": "a " * 999_000}, {200}, ""),
    ("66_no_shape", "/invocations", {"x": 1}, {422}, ""),
    ("67_no_list", "/vertex", {"instances": {}}, {422}, "instances"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "statuses", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
async def test_reliability_4_3_to_4_6_bad_requests(path: str, body: Any, statuses: set[int], text: str):
    async with serve() as served:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await served.client.post(path, content=content, headers={"content-type": "application/json"})

        assert answer.status_code in statuses, answer.text[:500]
        assert text in answer.text
        assert answer.status_code == 200 or set(answer.json()) == {"error", "error_type"}
        assert await serves_on(served)


async def test_reliability_4_4_47_template_source_is_text():
    source = "{{ 7*7 }}{% raw %}"
    messages = [{"role": "{{ 1 }}", "content": source}, {"role": "user", "content": [{"type": "text", "text": source}]}]
    async with serve() as served:
        answer = await served.client.post("/chat_tokenize", json={"messages": messages})

    assert answer.json()["templated_text"] == f"<|{{{{ 1 }}}}|>{source}<|user|>{source}<|assistant|>"


async def test_reliability_4_7_72_client_text_makes_no_new_series():
    async with serve() as served:
        for word in ("zebra", 'zebra"}', "zebra\n"):
            await served.client.post("/v1/completions", json={"prompt": "a", "model": word, "max_tokens": 1})
        await served.client.get("/zebra")
        await served.generate("zebra", adapter_id="zebra", max_new_tokens=1)
        text = (await served.client.get("/metrics")).text

    assert "tgi_request_success 4" in text.splitlines()
    assert "zebra" not in text


async def test_reliability_Q20_error_texts_are_cut():
    shard = ScriptedShard()
    shard.failures["prefill"] = ShardError("x" * 5000)
    async with serve(shard=shard) as served:
        failed = (await served.generate(max_new_tokens=1)).json()["error"]
        missing = (await served.client.post("/invocations", json={})).json()["error"]

    assert failed.startswith("Request failed during generation: Server error: xxx")
    assert (len(failed), failed[-1]) == (300, "…")
    assert len(missing) <= 300
