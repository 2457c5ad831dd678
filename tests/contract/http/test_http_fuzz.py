"""schemathesis against the router's own OpenAPI document, over a socket.

Valid and invalid bodies for every operation: in CI a few for each, in `make test-long` 60 for each. A body
that matches its schema may still be refused by another rule, and the platforms' routes answer some client errors with
500.
"""

import asyncio
import functools
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from reference_server.router.openapi import openapi_document
from tests.contract.http.test_http_openapi import PLATFORMS, mismatches, schema_of
from tests.support.servers.serving import events_of, serve_on_socket

DOCUMENT = openapi_document("0.0.0", PLATFORMS)
# The bodies of other operations in another frame or at another path: tested in the long suite.
ALIASES = ("/", "/invocations", "/predict", "/vertex")
OPERATIONS = [
    (path, method)
    for path, methods in sorted(DOCUMENT["paths"].items())
    for method in ("get", "post")
    if method in methods
]
MODES = ("positive", "negative")
TELLS_MISTAKES_AS_500 = ("/vertex", "/predict", "/v2/models/{name}/versions/{version}/infer")
IN_CI, IN_LONG_RUNS = 4, 30


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A router in its own thread; this thread sends the cases."""
    started, found = threading.Event(), {}

    async def run() -> None:
        stop = found["stop"] = asyncio.Event()
        found["loop"] = asyncio.get_running_loop()
        settings = {"port": {"value": 3000, "source": "default"}}
        async with serve_on_socket(facts={"platforms": PLATFORMS, "settings": settings}) as served:
            found["url"] = str(served.client.base_url)
            found["served"] = served
            started.set()
            await stop.wait()
            assert served.services.infer.permits.free == 128
            assert not served.shard.cached_ids

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(20)
    yield found["url"]
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join()


def answer_conformance(ctx: Any, response: Any, case: Any) -> bool | None:
    """Check a whole answer, or the data of each event: schemathesis would compare the schema with the whole stream."""
    from schemathesis.specs.openapi.checks import response_schema_conformance

    if response.headers.get("content-type") != ["text/event-stream"]:
        return bool(response_schema_conformance(ctx, response, case))
    schema = schema_of(case.operation.path, "post", "text/event-stream")
    assert [found for event in events_of(response.text) for found in mismatches(event, schema)] == []
    return None


@functools.cache
def schema() -> Any:
    """The document for schemathesis, whose import takes a second of each test process."""
    import schemathesis

    return schemathesis.openapi.from_dict(DOCUMENT)


def run_cases(url: str, path: str, method: str, mode: str, count: int) -> int:
    """Send `count` cases to one operation and check the answers. Returns the number of sent cases."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

    checks: list[Any] = [status_code_conformance, content_type_conformance, answer_conformance]
    if path not in TELLS_MISTAKES_AS_500:
        checks.append(not_a_server_error)
    operation, sent = schema()[path][method.upper()], 0

    @hypothesis.settings(
        max_examples=count,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def send(case: Any) -> None:
        nonlocal sent
        sent += 1
        case.validate_response(case.call(base_url=url, timeout=30), checks=checks)

    send()
    return sent


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("path", "method"),
    [pytest.param(*each, marks=pytest.mark.slow if each[0] in ALIASES else ()) for each in OPERATIONS],
)
def test_answers_are_as_the_document_says(url: str, path: str, method: str, mode: str):
    if method == "post":
        assert run_cases(url, path, method, mode, IN_CI) >= 1
    elif mode == "positive":
        assert run_cases(url, path, method, mode, 1) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_answers_of_each_operation_are_as_the_document_says(url: str):
    posts = [(path, method) for path, method in OPERATIONS if method == "post"]

    sent = sum(run_cases(url, *operation, mode, IN_LONG_RUNS) for operation in posts for mode in MODES)

    assert sent >= 0.8 * len(posts) * len(MODES) * IN_LONG_RUNS
