"""The FastAPI application: CORS, route, API key, method, body and errors, checked in this order.

FastAPI routes requests and turns exceptions into answers. Handlers write their answers directly to the server, so a
streamed token does not pass through the framework.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette import routing
from starlette.exceptions import HTTPException

from reference_server.errors import RequestError
from reference_server.router.api_key import ApiKeys
from reference_server.router.http_call import AsgiScope, ClientGoneError, HttpCall, HttpError, Receive, Route
from reference_server.router.routes.adapters import AdapterRoutes
from reference_server.router.routes.native import NativeRoutes
from reference_server.router.routes.openai import OpenAiRoutes
from reference_server.router.routes.ops import OpsRoutes
from reference_server.router.routes.platforms import PlatformRoutes
from reference_server.router.services import Services
from reference_server.router.sse import Header, Send
from reference_server.router.telemetry.refusal_log import RefusalLog
from reference_server.router.telemetry.request_context import RequestContext
from reference_server.router.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_VARY: Header = (b"vary", b"origin, access-control-request-method, access-control-request-headers")
_PREFLIGHT: list[Header] = [
    (b"access-control-allow-methods", b"GET,POST"),
    (b"access-control-allow-headers", b"content-type"),
]
_PROBES = ("/health", "/ping", "/ready")
_TGI_NAMES = {"chat": "chat_completions", "vertex": "vertex_compatibility"}
#: Key of the `HttpCall` in a request's scope.
_HTTP_CALL = "reference_server.http_call"


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Settings that apply before a handler runs."""

    payload_limit: int = 2_000_000
    api_keys: tuple[str, ...] = ()
    cors_allow_origin: tuple[str, ...] = ()
    plain_text_decode_errors: bool = False
    auth_all_routes: bool = False
    tracing: Tracing | None = None


def create_app(services: Services, options: TransportOptions) -> "RouterApp":
    """The application with all its routes."""
    native, openai = NativeRoutes(services), OpenAiRoutes(services)
    adapters = AdapterRoutes(services.adapters)
    parts = (native, openai, OpsRoutes(services), PlatformRoutes(services, native, openai), adapters)
    return RouterApp([route for part in parts for route in part.routes()], options)


class RouterApp(FastAPI):
    """Serves `routes`. A request ends when its client disconnects."""

    def __init__(self, routes: Sequence[Route], options: TransportOptions) -> None:
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route
        super().__init__(
            routes=[PathRoute(path, methods, options) for path, methods in by_path.items()],
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,
            exception_handlers={
                HTTPException: _answer_empty,
                RequestError: _answer_request_error,
                HttpError: _answer_decoding_in_text if options.plain_text_decode_errors else _answer_refusal,
            },
            # Newer FastAPI would export traces of its own, configured by OTEL_* variables.
            telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
        )
        self.refusals = RefusalLog()
        self._origins = frozenset(origin.encode() for origin in options.cors_allow_origin)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            http = scope[_HTTP_CALL] = HttpCall(scope, receive, send)
            http.add_headers(self._cors(http.header(b"origin")))
            if http.method == "OPTIONS":
                await http.answer(200, headers=_PREFLIGHT)
                return
        await super().__call__(scope, receive, send)

    def _cors(self, origin: bytes | None) -> Iterator[Header]:
        yield _VARY
        if not self._origins:
            yield b"access-control-allow-origin", b"*"
        elif origin in self._origins:
            yield b"access-control-allow-origin", origin


class PathRoute(routing.Route):
    """All methods of one path. The API key is checked before the method, except on `/`."""

    def __init__(self, path: str, methods: Mapping[str, Route], options: TransportOptions) -> None:
        super().__init__(path, Endpoint(methods, options), methods=list(methods))
        self._keys = ApiKeys(options.api_keys)
        self._locked = {method for method, route in methods.items() if route.needs_key}
        if options.auth_all_routes and path not in _PROBES:
            self._locked = {*methods, "HEAD"}
        self._locks_any_method = path != "/" and bool(self._locked)

    async def handle(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        http: HttpCall = scope[_HTTP_CALL]
        is_locked = self._locks_any_method or http.method in self._locked
        if self._keys.is_set and is_locked and self._keys.match(http.header(b"authorization")) is None:
            await http.answer(401)
        else:
            await super().handle(scope, receive, send)


class Endpoint:
    """Reads the body of a route and runs its handler until the client disconnects."""

    def __init__(self, methods: Mapping[str, Route], options: TransportOptions) -> None:
        self._methods = {"HEAD": methods["GET"], **methods} if "GET" in methods else methods
        self._payload_limit = options.payload_limit
        self._tracing = options.tracing
        self._keys = ApiKeys(options.api_keys)

    async def __call__(self, scope: AsgiScope, _receive: Receive, _send: Send) -> None:
        http: HttpCall = scope[_HTTP_CALL]
        try:
            await self._handle(self._methods[http.method], http)
        except (RequestError, HttpError):
            raise
        except ClientGoneError:
            pass
        except Exception:
            logger.exception("%s %s failed", http.method, http.path)
            if http.has_answered:
                raise
            await http.answer_error(500, "Internal error", "internal")

    async def _handle(self, route: Route, http: HttpCall) -> None:
        if not route.bodies:
            await route.handler(http, None)
            return
        with self._request_context(route, http):
            request = await http.read(route.bodies, self._payload_limit)
            async with cancelled_with_client(http.receive):
                await route.handler(http, request)

    @contextmanager
    def _request_context(self, route: Route, http: HttpCall) -> Iterator[None]:
        """Set the call's context; with tracing, inside the request's spans."""
        name = route.handler.__name__
        handler = _TGI_NAMES.get(name, name)
        key = self._keys.match(http.header(b"authorization"))
        client = http.client_address if key is None else f"key {key}"
        if self._tracing is None:
            http.context = RequestContext(handler, client)
            yield
            return
        traceparent = http.header(b"traceparent")
        with self._tracing.request(http.method, http.path, handler, traceparent) as span:
            http.context = RequestContext(handler, client, span)
            yield


@asynccontextmanager
async def cancelled_with_client(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client closes the connection, and raise `ClientGoneError`."""
    task = asyncio.current_task()
    assert task is not None, "handlers run in tasks"
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()


async def _answer_empty(request: Request, error: Exception) -> Response:
    """404 and 405: no body; `allow` lists the path's methods in alphabetical order."""
    assert isinstance(error, HTTPException), "registered for these"
    allowed = (error.headers or {}).get("Allow", "")
    headers = {"allow": ",".join(sorted(allowed.split(", ")))} if allowed else {}
    return _with_headers(request, Response(status_code=error.status_code, headers=headers))


async def _answer_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), "registered for these"
    request.app.refusals.note(error.error_type, error.status, error)
    return _error_response(request, error.status, str(error), error.error_type)


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError), "registered for these"
    request.app.refusals.note(error.error_type, error.status, error)
    response = _error_response(request, error.status, str(error), error.error_type)
    if error.status == 413:
        # The rest of the body has not been read.
        response.headers["connection"] = "close"
    return response


async def _answer_decoding_in_text(request: Request, error: Exception) -> Response:
    """A body that cannot be decoded, with `--plain-text-decode-errors`: plain text, as in TGI."""
    assert isinstance(error, HttpError), "registered for these"
    if not error.is_decoding:
        return await _answer_refusal(request, error)
    request.app.refusals.note(error.error_type, error.status, error)
    return _with_headers(request, PlainTextResponse(str(error), error.status))


def _error_response(request: Request, status: int, error: str, error_type: str) -> Response:
    return _with_headers(request, JSONResponse({"error": error, "error_type": error_type}, status))


def _with_headers(request: Request, response: Response) -> Response:
    """Add the headers that every answer to this request has."""
    http: HttpCall = request.scope[_HTTP_CALL]
    response.raw_headers.extend(http.headers)
    return response
