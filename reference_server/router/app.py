"""The ASGI application: CORS, routing, key, method, body and errors, in the order of http-api.md section 0.1."""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from reference_server.errors import RequestError
from reference_server.router.exchange import ClientGoneError, Exchange, Receive, Refusal, Route, Scope, Send
from reference_server.router.routes.generate import GenerateRoutes
from reference_server.router.routes.openai import OpenAiRoutes
from reference_server.router.routes.ops import OpsRoutes
from reference_server.router.services import Services
from reference_server.router.sse import Header

logger = logging.getLogger(__name__)

_VARY: Header = (b"vary", b"origin, access-control-request-method, access-control-request-headers")
_PREFLIGHT: list[Header] = [
    (b"access-control-allow-methods", b"GET,POST"),
    (b"access-control-allow-headers", b"content-type"),
]


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """The settings that act before a handler."""

    payload_limit: int = 2_000_000
    api_key: str | None = None
    cors_allow_origin: tuple[str, ...] = ()
    plain_text_decode_errors: bool = False
    auth_all_routes: bool = False


def create_app(services: Services, options: TransportOptions) -> "RouterApp":
    """The application with all of its routes."""
    parts = (OpsRoutes(services), GenerateRoutes(services), OpenAiRoutes(services))
    return RouterApp([route for part in parts for route in part.routes()], options)


class RouterApp:
    """Serves `routes`; a request that is cancelled by its client leaves nothing behind."""

    def __init__(self, routes: Sequence[Route], options: TransportOptions) -> None:
        self._options = options
        self._origins = frozenset(origin.encode() for origin in options.cors_allow_origin)
        self._expected = f"bearer {options.api_key}".lower().encode() if options.api_key else None
        self.routes: dict[str, dict[str, Route]] = {}
        for route in routes:
            methods = self.routes.setdefault(route.path, {})
            methods[route.method] = route
            if route.method == "GET":
                methods["HEAD"] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
            return
        assert scope["type"] == "http", f"{scope['type']} connections are refused by the server"
        exchange = Exchange(scope, receive, send)
        exchange.add_headers(self._cors(exchange.header(b"origin")))
        try:
            await self._dispatch(exchange)
        except ClientGoneError:
            pass
        except Refusal as refusal:
            await self._refuse(exchange, refusal)
        except RequestError as error:
            logger.error("%s", error)
            await exchange.answer_error(error.status, str(error), error.error_type)
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            if exchange.has_answered:
                raise
            await exchange.answer_error(500, "Internal error", "internal")

    async def _dispatch(self, exchange: Exchange) -> None:
        if exchange.method == "OPTIONS":
            await exchange.answer(200, headers=_PREFLIGHT)
            return
        methods = self.routes.get(exchange.path)
        if methods is None:
            await exchange.answer(404)
            return
        route = methods.get(exchange.method)
        if self._is_locked(methods, route) and not self._is_authorized(exchange):
            await exchange.answer(401)
        elif route is None:
            await exchange.answer(405, headers=[(b"allow", ",".join(_allowed(methods)).encode())])
        elif route.body is None:
            await route.handler(exchange, None)
        else:
            request = await exchange.read(route.body, self._options.payload_limit)
            async with cancelled_with_client(exchange.receive):
                await route.handler(exchange, request)

    def _is_locked(self, methods: Mapping[str, Route], route: Route | None) -> bool:
        """Whether the key is asked for, which happens before the method check, but not on `/`."""
        if self._expected is None:
            return False
        if self._options.auth_all_routes and not {"/health", "/ping"} & {each.path for each in methods.values()}:
            return True
        if route is None:
            return "/" not in {each.path for each in methods.values()} and any(
                each.needs_key for each in methods.values()
            )
        return route.needs_key

    def _is_authorized(self, exchange: Exchange) -> bool:
        given = exchange.header(b"authorization")
        assert self._expected is not None, "asked only when a key is set"
        return given is not None and hmac.compare_digest(given.lower(), self._expected)

    def _cors(self, origin: bytes | None) -> Iterator[Header]:
        yield _VARY
        if not self._origins:
            yield b"access-control-allow-origin", b"*"
        elif origin in self._origins:
            yield b"access-control-allow-origin", origin

    async def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        logger.error("%s", refusal)
        if refusal.is_decoding and self._options.plain_text_decode_errors:
            text = [(b"content-type", b"text/plain; charset=utf-8")]
            await exchange.answer(refusal.status, str(refusal).encode(), text)
        else:
            await exchange.answer_error(refusal.status, str(refusal), refusal.error_type)


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


def _allowed(methods: Mapping[str, Route]) -> list[str]:
    return [method for method in ("GET", "HEAD", "POST") if method in methods]


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    """Nothing starts or stops with the server: startup.py owns what outlives a request."""
    while True:
        phase = (await receive())["type"]
        await send({"type": f"{phase}.complete"})
        if phase == "lifespan.shutdown":
            return
