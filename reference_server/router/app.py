"""The FastAPI application: CORS, routing, key, method, body and errors, in the order of http-api.md section 0.1.

FastAPI routes a request and turns exceptions into answers. Handlers write their answers straight to the server, so a
streamed token never passes through the framework.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette import routing
from starlette.exceptions import HTTPException

from reference_server.errors import RequestError
from reference_server.router.exchange import ClientGoneError, Exchange, Receive, Refusal, Route, Scope, Send
from reference_server.router.request_context import CURRENT, RequestContext
from reference_server.router.routes.generate import GenerateRoutes
from reference_server.router.routes.openai import OpenAiRoutes
from reference_server.router.routes.ops import OpsRoutes
from reference_server.router.routes.platforms import PlatformRoutes
from reference_server.router.services import Services
from reference_server.router.sse import Header
from reference_server.router.tracing import Tracing

logger = logging.getLogger(__name__)

_VARY: Header = (b"vary", b"origin, access-control-request-method, access-control-request-headers")
_PREFLIGHT: list[Header] = [
    (b"access-control-allow-methods", b"GET,POST"),
    (b"access-control-allow-headers", b"content-type"),
]
_PROBES = ("/health", "/ping")
_TGI_NAMES = {"chat": "chat_completions", "vertex": "vertex_compatibility"}
#: Where the scope of a request keeps its `Exchange`.
_EXCHANGE = "reference_server.exchange"


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """The settings that act before a handler."""

    payload_limit: int = 2_000_000
    api_key: str | None = None
    cors_allow_origin: tuple[str, ...] = ()
    plain_text_decode_errors: bool = False
    auth_all_routes: bool = False
    tracing: Tracing | None = None


def create_app(services: Services, options: TransportOptions) -> "RouterApp":
    """The application with all of its routes."""
    generate, openai = GenerateRoutes(services), OpenAiRoutes(services)
    parts = (generate, openai, OpsRoutes(services), PlatformRoutes(services, generate, openai))
    return RouterApp([route for part in parts for route in part.routes()], options)


class RouterApp(FastAPI):
    """Serves `routes`; a request that is cancelled by its client leaves nothing behind."""

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
                Refusal: _answer_decoding_in_text if options.plain_text_decode_errors else _answer_refusal,
            },
            # Newer FastAPI traces by itself, and would export where OTEL_* variables say.
            telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
        )
        self._origins = frozenset(origin.encode() for origin in options.cors_allow_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            exchange = scope[_EXCHANGE] = Exchange(scope, receive, send)
            exchange.add_headers(self._cors(exchange.header(b"origin")))
            if exchange.method == "OPTIONS":
                await exchange.answer(200, headers=_PREFLIGHT)
                return
        await super().__call__(scope, receive, send)

    def _cors(self, origin: bytes | None) -> Iterator[Header]:
        yield _VARY
        if not self._origins:
            yield b"access-control-allow-origin", b"*"
        elif origin in self._origins:
            yield b"access-control-allow-origin", origin


class PathRoute(routing.Route):
    """All methods of one path. The key is asked for before the method is looked at, but not on `/`."""

    def __init__(self, path: str, methods: Mapping[str, Route], options: TransportOptions) -> None:
        super().__init__(path, Endpoint(methods, options), methods=list(methods))
        self._expected = f"bearer {options.api_key}".lower().encode() if options.api_key else None
        self._locked = {method for method, route in methods.items() if route.needs_key}
        if options.auth_all_routes and path not in _PROBES:
            self._locked = {*methods, "HEAD"}
        self._locks_any_method = path != "/" and bool(self._locked)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[_EXCHANGE]
        is_locked = self._locks_any_method or exchange.method in self._locked
        if self._expected is not None and is_locked and not self._is_authorized(exchange, self._expected):
            await exchange.answer(401)
        else:
            await super().handle(scope, receive, send)

    def _is_authorized(self, exchange: Exchange, expected: bytes) -> bool:
        given = exchange.header(b"authorization")
        return given is not None and hmac.compare_digest(given.lower(), expected)


class Endpoint:
    """Reads the body that a route wants and runs its handler for as long as the client stays."""

    def __init__(self, methods: Mapping[str, Route], options: TransportOptions) -> None:
        self._methods = {"HEAD": methods["GET"], **methods} if "GET" in methods else methods
        self._payload_limit = options.payload_limit
        self._tracing = options.tracing

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        exchange: Exchange = scope[_EXCHANGE]
        try:
            await self._handle(self._methods[exchange.method], exchange)
        except (RequestError, Refusal):
            raise
        except ClientGoneError:
            pass
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            if exchange.has_answered:
                raise
            await exchange.answer_error(500, "Internal error", "internal")

    async def _handle(self, route: Route, exchange: Exchange) -> None:
        if not route.bodies:
            await route.handler(exchange, None)
            return
        with self._context(route, exchange):
            request = await exchange.read(route.bodies, self._payload_limit)
            async with cancelled_with_client(exchange.receive):
                await route.handler(exchange, request)

    @contextmanager
    def _context(self, route: Route, exchange: Exchange) -> Iterator[None]:
        """Tells the rest of the program whose request this is."""
        name = route.handler.__name__
        handler = _TGI_NAMES.get(name, name)
        if self._tracing is None:
            CURRENT.set(RequestContext(handler, exchange.client))
            yield
            return
        traceparent = exchange.header(b"traceparent")
        with self._tracing.request(exchange.method, exchange.path, handler, traceparent) as trace:
            CURRENT.set(RequestContext(handler, exchange.client, trace))
            yield


@asynccontextmanager
async def cancelled_with_client(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block when the client closes the connection, and then raises `ClientGoneError`."""
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
    """404 and 405: no body, and the methods that a path has in the order of the specification."""
    assert isinstance(error, HTTPException), "registered for these"
    allowed = (error.headers or {}).get("Allow", "")
    headers = {"allow": ",".join(sorted(allowed.split(", ")))} if allowed else {}
    return _with_headers(request, Response(status_code=error.status_code, headers=headers))


async def _answer_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), "registered for these"
    logger.error("%s", error)
    return _error_response(request, error.status, str(error), error.error_type)


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal), "registered for these"
    logger.error("%s", error)
    response = _error_response(request, error.status, str(error), error.error_type)
    if error.status == 413:
        # What is left of the body has not been read.
        response.headers["connection"] = "close"
    return response


async def _answer_decoding_in_text(request: Request, error: Exception) -> Response:
    """TGI's own form of a body that cannot be decoded, under `--plain-text-decode-errors`."""
    assert isinstance(error, Refusal), "registered for these"
    if not error.is_decoding:
        return await _answer_refusal(request, error)
    logger.error("%s", error)
    return _with_headers(request, PlainTextResponse(str(error), error.status))


def _error_response(request: Request, status: int, error: str, error_type: str) -> Response:
    return _with_headers(request, JSONResponse({"error": error, "error_type": error_type}, status))


def _with_headers(request: Request, response: Response) -> Response:
    """The headers that every answer of this request carries."""
    exchange: Exchange = request.scope[_EXCHANGE]
    response.raw_headers.extend(exchange.headers)
    return response
