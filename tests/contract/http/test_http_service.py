"""Acceptance examples of the other routes; keys, methods, CORS, error bodies and permits."""

import httpx
import pytest
from starlette.routing import Route

from reference_server.router.app import TransportOptions
from reference_server.router.infer import Permits
from reference_server.router.server_info import Platforms
from reference_server.router.validation import validator
from tests.support.servers.serving import serve

BODY = {"inputs": "hello", "parameters": {"max_new_tokens": 1}}
INFO_KEYS = {
    "model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of", "max_stop_sequences",
    "max_input_tokens", "max_total_tokens", "validation_workers", "max_client_batch_size", "router", "version", "sha",
    "docker_label",
}  # fmt: skip


async def test_http_H59_routes_that_generate_need_the_api_key():
    async with serve(transport=TransportOptions(api_keys=("Secret",))) as served:
        client = served.client
        without = await client.post("/generate", json=BODY)
        wrong_method = await client.get("/generate")
        with_key = await client.post("/generate", json=BODY, headers={"authorization": "bearer Secret"})
        other_case = await client.post("/generate", json=BODY, headers={"authorization": "Bearer sEcRET"})
        undecodable = await client.post("/generate", json=BODY, headers={b"authorization": b"Bearer \xff"})
        open_paths = [await client.get(path) for path in ("/info", "/health", "/metrics", "/v1/models", "/")]
        chat = await client.post("/chat_tokenize", json={"messages": []})
        config = await client.get("/config")

    assert (without.status_code, without.content) == (401, b"")
    assert without.headers["access-control-allow-origin"] == "*"
    assert "www-authenticate" not in without.headers
    assert (wrong_method.status_code, undecodable.status_code, other_case.status_code) == (401, 401, 401)
    assert with_key.status_code == 200
    assert [response.status_code for response in [*open_paths, chat]] == [200] * 6
    assert config.status_code == 401


async def test_auth_all_routes_leaves_only_the_probes_open():
    options = TransportOptions(api_keys=("Secret",), auth_all_routes=True)
    platforms = Platforms(vertex=True, kserve=True, predict_route="/predict", health_route="/alive")
    async with serve(transport=options, facts={"platforms": platforms}) as served:
        calls = [
            (method, route.path)
            for route in served.app.routes
            if isinstance(route, Route)
            for method in sorted(route.methods or ())
        ]
        is_open = {
            call for call in calls if (await served.client.request(*call, json={"messages": []})).status_code != 401
        }

    assert len(calls) > 35
    assert is_open == {(method, path) for method in ("GET", "HEAD") for path in ("/health", "/ping", "/ready")}


async def test_http_H60_offsets_are_bytes():
    async with serve() as served:
        tokens = (await served.client.post("/tokenize", json={"inputs": "hé yo"})).json()

    assert [(token["text"], token["start"], token["stop"]) for token in tokens] == [
        ("", 0, 0),
        ("hé", 0, 3),
        ("yo", 4, 6),
    ]
    assert tokens[0]["id"] == 1


async def test_http_H60_models_and_info():
    async with serve() as served:
        models = (await served.client.get("/v1/models")).json()
        info = (await served.client.get("/info")).json()

    assert models == {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "m"}]}
    assert set(info) == INFO_KEYS | {"engine"}
    engine = {
        "backend",
        "attention",
        "kernels",
        "dtype",
        "quantize",
        "kv_cache_dtype",
        "block_size",
        "extensions",
        "tuned",
        "adapters",
    }
    assert set(info["engine"]) == engine | {"adapters"}
    assert {"ignore_eos_token", "ignore_eos", "min_new_tokens"} <= set(info["engine"]["extensions"])


async def test_http_H60_methods():
    async with serve() as served:
        client = served.client
        preflight = await client.options("/generate")
        anywhere = await client.options("/nope/")
        wrong = await client.get("/generate")
        wrong_root = await client.put("/")
        head = await client.head("/health")
        missing = await client.post("/generate/", json=BODY)

    assert (preflight.status_code, preflight.content) == (200, b"")
    assert preflight.headers["access-control-allow-methods"] == "GET,POST"
    assert preflight.headers["access-control-allow-headers"] == "content-type"
    assert anywhere.status_code == 200
    assert (wrong.status_code, wrong.headers["allow"], wrong.content) == (405, "POST", b"")
    assert wrong_root.headers["allow"] == "GET,HEAD,POST"
    assert (head.status_code, head.content) == (200, b"")
    assert (missing.status_code, missing.content) == (404, b"")


async def test_http_H60_metrics_after_one_generation():
    async with serve() as served:
        await served.generate(max_new_tokens=2)
        response = await served.client.get("/metrics")

    names = {line.split("{")[0].split()[0] for line in response.text.splitlines() if not line.startswith("#")}
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert "tgi_request_count 1" in response.text.splitlines()
    assert "tgi_request_success 1" in response.text.splitlines()
    assert 'tgi_request_duration_bucket{le="0.0003375"}' in response.text
    assert not [name for name in names if name.endswith(("_total", "_created"))]


@pytest.mark.parametrize(
    ("allowed", "origin", "echoed"),
    [
        ((), None, "*"),
        (("http://a",), "http://a", "http://a"),
        (("http://a",), "http://b", None),
        (("http://a",), None, None),
    ],
)
async def test_cors_headers(allowed: tuple[str, ...], origin: str | None, echoed: str | None):
    headers = {} if origin is None else {"origin": origin}
    async with serve(transport=TransportOptions(cors_allow_origin=allowed)) as served:
        response = await served.client.get("/nope", headers=headers)

    assert response.headers.get("access-control-allow-origin") == echoed
    assert response.headers["vary"] == "origin, access-control-request-method, access-control-request-headers"


async def test_plain_text_decode_errors_restore_the_target():
    async with serve(transport=TransportOptions(plain_text_decode_errors=True)) as served:
        broken = await served.client.post("/generate", json={})
        refused = await served.client.post("/generate", json={"inputs": ""})

    assert broken.headers["content-type"] == "text/plain; charset=utf-8"
    assert broken.text.startswith("Failed to deserialize the JSON body into the target type: ")
    assert refused.headers["content-type"] == "application/json"


async def test_every_error_body_is_an_error_response():
    async with serve() as served:
        answers: list[httpx.Response] = [
            await served.client.post("/generate", content=b"[" * 200 + b"]" * 200, headers={"content-type": "a/b"}),
            await served.client.post(
                "/generate", content=b"[" * 200 + b"]" * 200, headers={"content-type": "application/json"}
            ),
            await served.client.post("/v1/completions", json={"prompt": [[1, 2]]}),
            await served.client.post("/chat_tokenize", json={"messages": "x"}),
        ]

    assert [answer.status_code for answer in answers] == [415, 400, 422, 422]
    assert all(set(answer.json()) == {"error", "error_type"} for answer in answers)


@pytest.mark.parametrize("path", ["/v2/health/live", "/openapi.json", "/redoc", "/v1/embeddings", "/docs/nothing.css"])
async def test_routes_that_do_not_exist(path: str):
    async with serve() as served:
        assert (await served.client.post(path, json={})).status_code == 404


async def test_hardening_R10_a_key_is_compared_exactly_in_any_script():
    async with serve(transport=TransportOptions(api_keys=("Schlüssel-ÄÖ",))) as served:
        sent = {key: {b"authorization": f"BEARER {key}".encode()} for key in ("Schlüssel-ÄÖ", "schlüssel-äö")}
        statuses = [
            (await served.client.post("/generate", json=BODY, headers=headers)).status_code for headers in sent.values()
        ]

    assert statuses == [200, 401]


async def test_hardening_R13_a_new_authorization_value_is_no_new_client():
    async with serve() as served:
        served.services.infer.permits = Permits(10, per_client=1)
        with served.services.infer.permits.take("127.0.0.1"):
            statuses = [
                (await served.client.post("/generate", json=BODY, headers={"authorization": value})).status_code
                for value in ("Bearer a", "Bearer b")
            ]

    assert statuses == [429, 429]


async def test_hardening_R13_the_configured_key_is_one_client():
    async with serve(transport=TransportOptions(api_keys=("k",))) as served:
        served.services.infer.permits = Permits(10, per_client=1)
        with served.services.infer.permits.take("127.0.0.1"):
            answer = await served.client.post("/generate", json=BODY, headers={"authorization": "Bearer k"})

    assert answer.status_code == 200


async def test_one_client_may_not_hold_all_permits():
    async with serve() as served:
        served.services.infer.permits = Permits(10, per_client=1)
        with served.services.infer.permits.take("key-or-address"):
            other = await served.generate(max_new_tokens=1)
            two = await served.client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1})
            again = await served.generate(max_new_tokens=1)

    assert (other.status_code, two.status_code, again.status_code) == (200, 429, 200)
    assert served.services.infer.permits.held == {}


async def test_tokenizing_is_bounded_without_permits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(validator, "MAX_TOKENIZE_JOBS", 0)
    async with serve(permits=0) as served:
        response = await served.client.post("/tokenize", json={"inputs": "x"})

    assert (response.status_code, response.json()["error_type"]) == (429, "overloaded")
