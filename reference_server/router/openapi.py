"""The OpenAPI 3.0.3 document: requests from their pydantic models, answers from the table below.

Our extensions to TGI are included; their fields are marked `x-extension`.
"""

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from reference_server.router.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from reference_server.router.schemas.openai import ChatRequest, CompletionRequest
from reference_server.router.schemas.platforms import InferRequest, VertexRequest
from reference_server.router.schemas.tgi import CompatGenerateRequest, GenerateRequest
from reference_server.router.server_info import Platforms

JsonSchema = dict[str, Any]

_REQUESTS = (
    *(GenerateRequest, CompatGenerateRequest, CompletionRequest, ChatRequest, VertexRequest, InferRequest),
    *(LoadAdapterRequest, UnloadAdapterRequest),
)
_PLATFORM_SCHEMAS = {
    "vertex": ("VertexRequest", "VertexGenerate", "VertexResponse"),
    "kserve": ("InferRequest", "InferInput", "InferOutput", "InferResponse", "OutputChunk", "LiveResponse",
               "MetadataServerResponse", "MetadataModelResponse"),
}  # fmt: skip
_REF = "#/components/schemas/{model}"
#: TGI's component names of the models whose class has another name.
_TGI_COMPONENTS = {"ChatMessage": "Message", "RequestGrammar": "GrammarType"}

_TEXT: JsonSchema = {"type": "string"}
_COUNT: JsonSchema = {"type": "integer", "minimum": 0}
_FLAG: JsonSchema = {"type": "boolean"}
_NUMBER: JsonSchema = {"type": "number", "format": "float"}


def _ref(name: str) -> JsonSchema:
    return {"$ref": _REF.format(model=name)}


def _list(items: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": items}


def _nullable(schema: JsonSchema) -> JsonSchema:
    return {"allOf": [schema], "nullable": True} if "$ref" in schema else {**schema, "nullable": True}


def _object(optional: Mapping[str, JsonSchema] | None = None, **required: JsonSchema) -> JsonSchema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _one_of(*values: str) -> JsonSchema:
    return {"type": "string", "enum": list(values)}


_FINISH = _ref("FinishReason")
_OPENAI_FINISH = _one_of("stop", "length")
_CHAT_FINISH = _one_of("stop", "length", "tool_calls")
_CACHED: JsonSchema = {
    **_COUNT,
    "description": "Prompt tokens found in the prefix cache; 0 where it is off.",
    "x-extension": True,
}
_ARGUMENTS: JsonSchema = {**_TEXT, "description": "JSON of an object; in a stream, the deltas joined."}
_SEQUENCE = {
    "finish_reason": _FINISH,
    "generated_tokens": _COUNT,
    "seed": _nullable(_COUNT),
    "prefill": _list(_ref("PrefillToken")),
    "tokens": _list(_ref("Token")),
}
_TOP_TOKENS = {"top_tokens": _list(_list(_ref("Token")))}
_OPENAI_FRAME = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "system_fingerprint": _TEXT}

ANSWERS: Mapping[str, JsonSchema] = {
    "ErrorResponse": _object(error=_TEXT, error_type=_TEXT),
    "ErrorEvent": _object(error=_object(message=_TEXT, http_status_code=_COUNT)),
    "Done": _one_of("[DONE]"),
    "FinishReason": _one_of("length", "eos_token", "stop_sequence"),
    "PrefillToken": _object(id=_COUNT, text=_TEXT, logprob=_nullable(_NUMBER)),
    "Token": _object(id=_COUNT, text=_TEXT, logprob=_nullable(_NUMBER), special=_FLAG),
    "SimpleToken": _object(id=_COUNT, text=_TEXT, start=_COUNT, stop=_COUNT),
    "BestOfSequence": _object(_TOP_TOKENS, generated_text=_TEXT, **_SEQUENCE),
    "Details": _object(
        {
            **_TOP_TOKENS,
            "best_of_sequences": _list(_ref("BestOfSequence")),
        },
        **_SEQUENCE,
        cached_input_tokens=_CACHED,
    ),
    "GenerateResponse": _object({"details": _ref("Details")}, generated_text=_TEXT),
    "StreamDetails": _object(
        finish_reason=_FINISH,
        generated_tokens=_COUNT,
        seed=_nullable(_COUNT),
        input_length=_COUNT,
        cached_input_tokens=_CACHED,
    ),
    "StreamResponse": _object(
        {"top_tokens": _list(_ref("Token"))},
        index=_COUNT,
        token=_ref("Token"),
        generated_text=_nullable(_TEXT),
        details=_nullable(_ref("StreamDetails")),
    ),
    "TokenizeResponse": _list(_ref("SimpleToken")),
    "ChatTokenizeResponse": _object(tokenize_response=_ref("TokenizeResponse"), templated_text=_TEXT),
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    "CompletionComplete": _object(
        index=_COUNT, text=_TEXT, logprobs=_nullable(_list(_NUMBER)), finish_reason=_OPENAI_FINISH
    ),
    "CompletionFinal": _object(
        object=_one_of("text_completion"),
        **_OPENAI_FRAME,
        choices=_list(_ref("CompletionComplete")),
        usage=_ref("Usage"),
    ),
    "Chunk": _object(
        {"usage": _ref("Usage")},
        object=_one_of("text_completion"),
        **_OPENAI_FRAME,
        choices=_list(
            _object(
                index=_COUNT, text=_TEXT, logprobs=_nullable(_list(_NUMBER)), finish_reason=_nullable(_OPENAI_FINISH)
            )
        ),
    ),
    "ChatCompletionTopLogprob": _object(token=_TEXT, logprob=_nullable(_NUMBER)),
    "ChatCompletionLogprob": _object(
        token=_TEXT, logprob=_nullable(_NUMBER), top_logprobs=_list(_ref("ChatCompletionTopLogprob"))
    ),
    "ChatCompletionLogprobs": _object(content=_list(_ref("ChatCompletionLogprob"))),
    "TextMessage": _object(role=_TEXT, content=_TEXT),
    "ToolCall": _object(
        id=_TEXT,
        type=_one_of("function"),
        function=_object(description=_nullable(_TEXT), name=_TEXT, arguments=_ARGUMENTS),
    ),
    "ToolCallMessage": _object(role=_TEXT, tool_calls=_list(_ref("ToolCall"))),
    "OutputMessage": {"anyOf": [_ref("TextMessage"), _ref("ToolCallMessage")]},
    "DeltaToolCall": _object(
        index=_COUNT,
        id=_TEXT,
        type=_one_of("function"),
        function=_object(name=_nullable(_TEXT), arguments=_ARGUMENTS),
    ),
    "ToolCallDelta": _object(role=_TEXT, tool_calls=_list(_ref("DeltaToolCall"))),
    "ToolCallEnd": _object(role=_TEXT),
    "ChatCompletionDelta": {"anyOf": [_ref("TextMessage"), _ref("ToolCallDelta"), _ref("ToolCallEnd")]},
    "ChatCompletionComplete": _object(
        index=_COUNT,
        message=_ref("OutputMessage"),
        logprobs=_nullable(_ref("ChatCompletionLogprobs")),
        finish_reason=_CHAT_FINISH,
    ),
    "ChatCompletion": _object(
        object=_one_of("chat.completion"),
        **_OPENAI_FRAME,
        choices=_list(_ref("ChatCompletionComplete")),
        usage=_ref("Usage"),
    ),
    "ChatCompletionChoice": _object(
        index=_COUNT,
        delta=_ref("ChatCompletionDelta"),
        logprobs=_nullable(_ref("ChatCompletionLogprobs")),
        finish_reason=_nullable(_CHAT_FINISH),
    ),
    "ChatCompletionChunk": _object(
        object=_one_of("chat.completion.chunk"),
        **_OPENAI_FRAME,
        choices=_list(_ref("ChatCompletionChoice")),
        usage=_nullable(_ref("Usage")),
    ),
    "ModelInfo": _object(id=_TEXT, object=_one_of("model"), created=_COUNT, owned_by=_TEXT),
    "ModelsInfo": _object(object=_one_of("list"), data=_list(_ref("ModelInfo"))),
    "Engine": _object(
        backend=_nullable(_TEXT),
        attention=_object(prefill=_nullable(_TEXT), decode=_nullable(_TEXT)),
        kernels=_nullable(_list(_TEXT)),
        dtype=_nullable(_TEXT),
        quantize=_nullable(_TEXT),
        kv_cache_dtype=_nullable(_TEXT),
        block_size=_nullable(_COUNT),
        extensions=_list(_TEXT),
        tuned=_nullable({"type": "object"}),
        adapters=_list(_TEXT),
    ),
    "Info": _object(
        model_id=_TEXT,
        model_sha=_nullable(_TEXT),
        model_pipeline_tag=_nullable(_TEXT),
        max_concurrent_requests=_COUNT,
        max_best_of=_COUNT,
        max_stop_sequences=_COUNT,
        max_input_tokens=_COUNT,
        max_total_tokens=_COUNT,
        validation_workers=_COUNT,
        max_client_batch_size=_COUNT,
        router=_TEXT,
        version=_TEXT,
        sha=_nullable(_TEXT),
        docker_label=_nullable(_TEXT),
        engine={**_ref("Engine")},
    ),
    "VertexResponse": _object(predictions=_list(_TEXT)),
    "LiveResponse": _object(live=_FLAG),
    "MetadataServerResponse": _object(name=_TEXT, version=_TEXT, extensions=_list(_TEXT)),
    "MetadataModelResponse": _object(name=_TEXT, version=_TEXT, extensions=_list(_TEXT)),
    "OutputChunk": _object(name=_TEXT, shape=_list(_COUNT), datatype=_TEXT, data=_list(_COUNT)),
    "InferResponse": _object(id=_TEXT, outputs=_list(_ref("OutputChunk"))),
    "Setting": _object({"reason": _TEXT}, value={"nullable": True}, source=_TEXT),
}

_GENERATING = {
    "400": "The body is not JSON",
    "413": "The body is too large",
    "415": "The content type is not JSON",
    "422": "Validation error",
    "424": "Generation error",
    "429": "Model is overloaded",
    "500": "Incomplete generation",
}
_READING = {status: text for status, text in _GENERATING.items() if status not in ("424", "500")}


def openapi_document(version: str, platforms: Platforms | None = None) -> JsonSchema:
    """The document for this version, with the routes that are served."""
    platforms = platforms or Platforms()
    stream = _events("StreamResponse", "ErrorResponse")
    chat = {**_json(_ref("ChatCompletion")), **_events("ChatCompletionChunk", "ErrorEvent", "Done")}
    completion = {**_json(_ref("CompletionFinal")), **_events("Chunk", "ErrorEvent", "Done")}
    compat = {**_json(_list(_ref("GenerateResponse"))), **stream}
    plain = {"text/plain": {"schema": _TEXT}}
    healthy = _get("Health", {}, {"503": "The model server is unhealthy"})
    any_request = {"anyOf": [_ref(name) for name in ("CompatGenerateRequest", "ChatRequest", "CompletionRequest")]}
    any_answer = {"anyOf": [_list(_ref("GenerateResponse")), _ref("ChatCompletion"), _ref("CompletionFinal")]}
    any_events = _events("StreamResponse", "ErrorResponse", "ChatCompletionChunk", "Chunk", "ErrorEvent", "Done")
    any_content = {**_json(any_answer), **any_events}
    paths = {
        "/": {**healthy, **_post("Generate, or stream with `stream`", "CompatGenerateRequest", compat, _GENERATING)},
        "/generate": _post("Generate", "GenerateRequest", _json(_ref("GenerateResponse")), _GENERATING),
        "/generate_stream": _post("Stream tokens as events", "GenerateRequest", stream, _GENERATING),
        "/v1/completions": _post("Complete prompts", "CompletionRequest", completion, _GENERATING),
        "/v1/chat/completions": _post("Chat", "ChatRequest", chat, _GENERATING),
        "/invocations": _post("As `/`, chat or completions, for SageMaker", any_request, any_content, _GENERATING),
        "/tokenize": _post("Tokenize", "GenerateRequest", _json(_ref("TokenizeResponse")), _READING),
        "/chat_tokenize": _post(
            "Render a template and tokenize", "ChatRequest", _json(_ref("ChatTokenizeResponse")), _READING
        ),
        "/info": _get("Properties of the server", _json(_ref("Info"))),
        "/health": healthy,
        "/ping": healthy,
        "/ready": _get("Readiness", {}, {"503": "The router stops, or the model server is unhealthy"}),
        "/metrics": _get("Prometheus text", plain),
        "/v1/models": _get("The model and its adapters", _json(_ref("ModelsInfo"))),
        "/v1/load_lora_adapter": _post("Load an adapter", "LoadAdapterRequest", plain, _READING),
        "/v1/unload_lora_adapter": _post(
            "Unload an adapter", "UnloadAdapterRequest", plain, {**_READING, "404": "No such adapter is loaded"}
        ),
        "/config": _get(
            "Every setting and its source",
            _json({"type": "object", "additionalProperties": _ref("Setting")}),
        ),
    }
    schemas = {**_request_schemas(), **ANSWERS}
    for name, more in (("vertex", _vertex_paths(platforms)), ("kserve", _kserve_paths(platforms))):
        paths |= more
        if not more:
            schemas = {each: schema for each, schema in schemas.items() if each not in _PLATFORM_SCHEMAS[name]}
    return {
        "openapi": "3.0.3",
        "info": {"title": "Text generation router", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _vertex_paths(platforms: Platforms) -> JsonSchema:
    if not platforms.vertex:
        return {}
    predict = _post("Predict, for Vertex AI", "VertexRequest", _json(_ref("VertexResponse")), _GENERATING)
    health = _get("Health", {}, {"503": "The model server is unhealthy"})
    paths = {"/vertex": predict}
    if platforms.predict_route:
        paths[platforms.predict_route] = predict
    if platforms.health_route:
        paths[platforms.health_route] = health
    return paths


def _kserve_paths(platforms: Platforms) -> JsonSchema:
    if not platforms.kserve:
        return {}
    live = _get("Liveness", _json(_ref("LiveResponse")))
    model = "/v2/models/{name}/versions/{version}"
    paths = {
        "/v2": _get("Properties of the server", _json(_ref("MetadataServerResponse"))),
        "/v2/health/live": live,
        "/v2/health/ready": live,
        model: _get("Properties of the model", _json(_ref("MetadataModelResponse"))),
        f"{model}/ready": live,
        f"{model}/infer": _post("Infer", "InferRequest", _json(_ref("InferResponse")), _GENERATING),
    }
    named = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in ("name", "version")]
    return {
        path: {method: {**each, "parameters": named} for method, each in methods.items()} if "{" in path else methods
        for path, methods in paths.items()
    }


def _json(schema: JsonSchema) -> JsonSchema:
    return {"application/json": {"schema": schema}}


def _events(*names: str) -> JsonSchema:
    """An event stream: the schemas of an event's data."""
    return {"text/event-stream": {"schema": {"anyOf": [_ref(name) for name in names]}}}


def _responses(content: JsonSchema, errors: Mapping[str, str]) -> JsonSchema:
    answer = {"description": "Done"} | ({"content": content} if content else {})
    refused = {
        status: {"description": text, "content": _json(_ref("ErrorResponse"))} for status, text in errors.items()
    }
    return {"200": answer, **refused}


def _get(summary: str, content: JsonSchema, errors: Mapping[str, str] | None = None) -> JsonSchema:
    return {"get": {"summary": summary, "responses": _responses(content, errors or {})}}


def _post(summary: str, body: str | JsonSchema, content: JsonSchema, errors: Mapping[str, str]) -> JsonSchema:
    request = {"required": True, "content": _json(_ref(body) if isinstance(body, str) else body)}
    return {"post": {"summary": summary, "requestBody": request, "responses": _responses(content, errors)}}


def _request_schemas() -> JsonSchema:
    _, schema = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REF)
    return {_component_name(name): _as_openapi(each) for name, each in schema["$defs"].items()}


def _component_name(model: str) -> str:
    return _TGI_COMPONENTS.get(model, model)


def _as_openapi(schema: Any) -> Any:
    """JSON Schema 2020-12 as OpenAPI 3.0: `nullable` for a null type, `enum` for a const, no null default."""
    if isinstance(schema, list):
        return [_as_openapi(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {
        key: _as_openapi(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and not value)
    }
    if "$ref" in plain:
        plain["$ref"] = _ref(_component_name(plain["$ref"].rpartition("/")[2]))["$ref"]
    if "const" in plain:
        plain["enum"] = [plain.pop("const")]
    choices = plain.get("anyOf")
    if choices is None or {"type": "null"} not in choices:
        return plain
    others = [choice for choice in choices if choice != {"type": "null"}]
    del plain["anyOf"]
    if len(others) > 1:
        return {**plain, "anyOf": others, "nullable": True}
    return {**_nullable(others[0]), **plain}
