"""The platforms' routes and the documentation page."""

from typing import Any

import pytest

from reference_server.router.app import TransportOptions
from reference_server.router.server_info import Platforms
from tests.support.servers.serving import serve

INCOMPLETE = {"error": "Incomplete generation", "error_type": "Incomplete generation"}
USER = {"role": "user", "content": "hi"}
INFER = "/v2/models/m/versions/1/infer"


def infer_body(*prompts: bytes, outputs: int | None = None, **parameters: Any) -> dict[str, Any]:
    inputs = [
        {"name": f"in{index}", "shape": [1, len(prompt)], "datatype": "BYTES", "data": list(prompt)}
        for index, prompt in enumerate(prompts)
    ]
    names = [{"name": f"out{index}"} for index in range(len(prompts) if outputs is None else outputs)]
    return {"id": "7", "inputs": inputs, "outputs": names, "parameters": {"max_new_tokens": 2, **parameters}}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"inputs": "x", "parameters": {"max_new_tokens": 1}}, "generated_text"),
        ({"messages": [USER]}, "chat.completion"),
        ({"prompt": "x"}, "text_completion"),
        ({"inputs": "x", "messages": [USER]}, "generated_text"),
        ({"inputs": "x", "parameters": {"top_k": "no"}, "prompt": "x"}, "text_completion"),
    ],
)
async def test_an_invocation_is_the_first_shape_that_decodes(body: dict[str, Any], kind: str):
    async with serve() as served:
        answer = (await served.client.post("/invocations", json=body)).json()

    assert kind in (answer[0] if isinstance(answer, list) else {answer["object"]})


async def test_an_invocation_of_no_shape_is_a_decode_failure():
    async with serve() as served:
        response = await served.client.post("/invocations", json={"text": "x"})
        streamed = await served.client.post("/invocations", json={"prompt": "x", "stream": True})

    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert response.json()["error"].startswith("Failed to deserialize the JSON body into the target type: ")
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_vertex_answers_prompts_and_conversations_in_order():
    instances = [
        {"inputs": "hello", "parameters": {"max_new_tokens": 2, "seed": 3, "temperature": -1.0}},
        {"messages": [USER], "max_tokens": 3, "stream": True},
        {"inputs": "hello", "parameters": None},
    ]
    async with serve() as served:
        response = await served.client.post("/vertex", json={"instances": instances})
        first = next(request for request in served.requests if request.parameters.seed == 3)
        count = await served.metric("tgi_request_count")
        successes = await served.metric("tgi_request_success")

    assert response.json() == {"predictions": [" a b", " a b c", " a b c d e"]}
    assert (first.parameters.do_sample, first.parameters.temperature) == (True, 1.0)
    assert (count, successes) == ("4", "3")


@pytest.mark.parametrize(
    ("instances", "status", "body"),
    [
        ([], 422, {"error": "Input validation error", "error_type": "Input validation error"}),
        ([{"inputs": ""}], 500, INCOMPLETE),
        ([{"inputs": "x"}, {"messages": [USER], "top_p": 2.0}], 500, INCOMPLETE),
    ],
)
async def test_vertex_failures(instances: list[Any], status: int, body: dict[str, str]):
    async with serve() as served:
        response = await served.client.post("/vertex", json={"instances": instances})

    assert (response.status_code, response.json()) == (status, body)


async def test_vertex_reports_template_errors_and_wrong_shapes():
    async with serve(template=None) as served:
        template = await served.client.post("/vertex", json={"instances": [{"messages": [USER]}]})
        shape = await served.client.post("/vertex", json={"instances": [{"text": "x"}]})

    assert (template.status_code, template.json()["error_type"]) == (422, "template_error")
    assert (shape.status_code, shape.json()["error_type"]) == (422, "validation")


async def test_vertex_instances_take_a_permit_each():
    async with serve(permits=1) as served:
        response = await served.client.post("/vertex", json={"instances": [{"inputs": "x"}, {"inputs": "y"}]})

        assert (response.status_code, served.services.infer.permits.free) == (500, 1)


async def test_the_paths_that_vertex_names_need_no_key():
    platforms = Platforms(vertex=True, predict_route="/predict", health_route="/alive")
    async with serve(facts={"platforms": platforms}, transport=TransportOptions(api_keys=("k",))) as served:
        body = {"instances": [{"inputs": "x", "parameters": {"max_new_tokens": 1}}]}
        predicted = await served.client.post("/predict", json=body)
        alive = await served.client.get("/alive")
        locked = await served.client.post("/vertex", json=body)

    assert predicted.json() == {"predictions": [" a"]}
    assert (alive.status_code, locked.status_code) == (200, 401)


async def test_kserve_reports_its_metadata():
    async with serve(facts={"platforms": Platforms(kserve=True)}) as served:
        paths = (
            "/v2",
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/a/versions/2",
            "/v2/models/a/versions/2/ready",
        )
        bodies = [(await served.client.get(path)).json() for path in paths]

    live = {"live": True}
    assert bodies == [
        {"name": "text-generation-inference", "version": "0.0.0", "extensions": ["health", "models", "metrics"]},
        live,
        live,
        {"name": "a", "version": "2", "extensions": ["infer", "ready"]},
        live,
    ]


async def test_kserve_infers_from_bytes():
    async with serve(facts={"platforms": Platforms(kserve=True)}) as served:
        body = (await served.client.post(INFER, json=infer_body("hé".encode()))).json()
        (request,) = served.requests

    assert body == {
        "id": "7",
        "outputs": [{"name": "out0", "shape": [1, 4], "datatype": "BYTES", "data": list(b" a b")}],
    }
    assert request.text == "hé"


@pytest.mark.parametrize(
    ("body", "status", "error_type"),
    [
        (infer_body(b"\xff"), 422, "utf8"),
        (infer_body(b"x", outputs=2), 422, "length mismatch"),
        (infer_body(b"x", top_k=0), 500, "Incomplete generation"),
        ({**infer_body(b"x"), "inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": [256]}]},
         422, "validation"),
    ],
)  # fmt: skip
async def test_kserve_refusals(body: dict[str, Any], status: int, error_type: str):
    async with serve(facts={"platforms": Platforms(kserve=True)}) as served:
        response = await served.client.post(INFER, json=body)

    assert (response.status_code, response.json()["error_type"]) == (status, error_type)


async def test_the_documentation_page_loads_nothing_from_other_hosts():
    async with serve() as served:
        redirect = await served.client.get("/docs")
        page = await served.client.get("/docs/")

    assert (redirect.status_code, redirect.headers["location"]) == (303, "/docs/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "/api-doc/openapi.json" in page.text
    assert "://" not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none'")


async def test_single_completions_do_not_request_the_prompts_logprobs():
    """TGI requests them, but no client receives them, and the request would bypass the prefix cache."""
    async with serve() as served:
        await served.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        (request,) = served.requests

    assert not request.prefill_logprobs
