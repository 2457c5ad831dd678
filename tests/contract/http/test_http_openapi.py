"""The OpenAPI document describes the answers that the router sends."""

from collections.abc import Mapping
from typing import Any

import pytest
from starlette.routing import Route

from reference_server.router import cli
from reference_server.router.openapi import openapi_document
from reference_server.router.server_info import Platforms
from tests.support.samples.grammars import compiler
from tests.support.servers.serving import Served, events_of, serve
from tests.support.wire.scripted_shard import say

PLATFORMS = Platforms(vertex=True, kserve=True, predict_route="/predict", health_route="/alive")
DOCUMENT = openapi_document("1.0", PLATFORMS)
SCHEMAS = DOCUMENT["components"]["schemas"]
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


def mismatches(value: Any, schema: Mapping[str, Any], where: str = "$") -> list[str]:
    """Differences between `value` and `schema`; keys that are not in the schema count."""
    if "$ref" in schema:
        return mismatches(value, SCHEMAS[schema["$ref"].rsplit("/", 1)[1]], where)
    if value is None and (schema.get("nullable") or not schema):
        return []
    if "allOf" in schema:
        return [each for part in schema["allOf"] for each in mismatches(value, part, where)]
    if "anyOf" in schema and "type" not in schema:
        return min((mismatches(value, each, where) for each in schema["anyOf"]), key=len)
    if "type" not in schema:
        return []
    if not isinstance(value, TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return [f"{where}: {value!r} is no {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    if isinstance(value, list):
        return [each for i, item in enumerate(value) for each in mismatches(item, schema["items"], f"{where}[{i}]")]
    if not isinstance(value, dict):
        return []
    known, rest = schema.get("properties", {}), schema.get("additionalProperties")
    found = [f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value]
    for name, item in value.items():
        inner = known.get(name, rest)
        if inner is not None:
            found += mismatches(item, inner, f"{where}.{name}")
        elif known:
            found.append(f"{where}: {name} is not described")
    return found


def schema_of(path: str, method: str, media: str) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = DOCUMENT["paths"][path][method]["responses"]["200"]["content"][media]["schema"]
    return schema


async def whole(served: Served, path: str, body: dict[str, Any] | None) -> Any:
    client = served.client
    return (await (client.get(path) if body is None else client.post(path, json=body))).json()


CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "n": 2}
ALL_DETAILS = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "best_of": 2, "do_sample": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/", {"inputs": "x"}),
        ("/generate", {"inputs": "x", "parameters": ALL_DETAILS}),
        ("/generate", {"inputs": "x"}),
        ("/tokenize", {"inputs": "x y"}),
        ("/chat_tokenize", CHAT),
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/chat/completions", CHAT),
        ("/info", None),
        ("/v1/models", None),
        ("/config", None),
        ("/invocations", {"inputs": "x"}),
        ("/vertex", {"instances": [{"inputs": "x"}]}),
        ("/v2", None),
        ("/v2/health/live", None),
    ],
)
async def test_answers_are_as_described(path: str, body: dict[str, Any] | None):
    schema = schema_of(path, "get" if body is None else "post", "application/json")
    settings = {"port": {"value": 3000, "source": "default"}, "x": {"value": None, "source": "derived", "reason": "r"}}
    async with serve(facts={"settings": settings, "platforms": PLATFORMS}) as served:
        answer = await whole(served, path, body)

    assert mismatches(answer, schema) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/", {"inputs": "x", "stream": True}),
        ("/generate_stream", {"inputs": "x", "parameters": {"details": True, "top_n_tokens": 2}}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ],
)
async def test_events_are_as_described(path: str, body: dict[str, Any]):
    schema = schema_of(path, "post", "text/event-stream")
    async with serve() as served:
        events = events_of((await served.client.post(path, json=body)).text)

    assert [mismatch for event in events if event != "[DONE]" for mismatch in mismatches(event, schema)] == []


@pytest.mark.parametrize("platforms", [Platforms(), PLATFORMS])
async def test_every_route_is_described_and_served(platforms: Platforms):
    async with serve(facts={"platforms": platforms}) as served:
        described = (await served.client.get("/api-doc/openapi.json")).json()
        served_routes = {
            (route.path, method) for route in served.app.routes if isinstance(route, Route) for method in route.methods
        }

    documented = {(path, method.upper()) for path, methods in described["paths"].items() for method in methods}
    assert served_routes - documented == {(path, "HEAD") for path, method in served_routes if method == "HEAD"} | {
        ("/api-doc/openapi.json", "GET"),
        ("/docs", "GET"),
        ("/docs/", "GET"),
        *([] if platforms.vertex else [("/vertex", "POST")]),
    }
    assert documented <= served_routes


@pytest.mark.parametrize(
    "texts", [('{"function": {"_name": "f', '",', '"a": 1}}'), ("no", "call")], ids=["call", "none"]
)
async def test_calls_of_tools_are_as_described(texts: tuple[str, ...]):
    body = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
    path, errors = "/v1/chat/completions", SCHEMAS["ErrorResponse"]
    async with serve(script=say(*texts), compile_grammar=compiler().compile) as served:
        answer = await whole(served, path, body)
        events = events_of((await served.client.post(path, json=body | {"stream": True})).text)

    stream = schema_of(path, "post", "text/event-stream")
    assert mismatches(answer, errors if "error" in answer else schema_of(path, "post", "application/json")) == []
    assert [mismatch for event in events[:-1] for mismatch in mismatches(event, stream)] == []


def test_extensions_are_marked():
    marked = {
        name: {key for key, field in SCHEMAS[name]["properties"].items() if field.get("x-extension")}
        for name in ("GenerateParameters", "CompletionRequest", "ChatRequest")
    }
    native = {"ignore_eos_token", "min_new_tokens"}

    assert marked == {
        "GenerateParameters": native,
        "CompletionRequest": native | {"ignore_eos"},
        "ChatRequest": native | {"ignore_eos"},
    }


def test_a_tool_choice_needs_no_type():
    choice = SCHEMAS["ToolChoiceObject"]

    assert choice["required"] == ["function"]
    assert choice["properties"]["type"]["enum"] == ["function"]
    assert choice["properties"]["type"]["default"] == "function"


def test_references_resolve_and_nothing_newer_than_3_0_is_used():
    def walk(node: Any) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item)
        elif isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].rsplit("/", 1)[1] in SCHEMAS
            assert node.get("type") != "null"
            assert "const" not in node
            assert "$defs" not in node
            for item in node.values():
                walk(item)

    walk(DOCUMENT)


def test_print_schema_contacts_nothing(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["print-schema"]) == 0
    assert '"openapi": "3.0.3"' in capsys.readouterr().out
