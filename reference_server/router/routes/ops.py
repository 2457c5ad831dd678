"""/info /config /health /ping /metrics /v1/models /docs /api-doc/openapi.json, and GET of /."""

from pathlib import Path
from typing import Any

from reference_server.router.exchange import Exchange, Route
from reference_server.router.openapi import openapi_document
from reference_server.router.services import Services

_DOCS_PAGE = Path(__file__).parent.parent / "docs.html"
_HTML = [
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    ),
]
_PLAIN_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]


class OpsRoutes:
    """What operators and probes ask for."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/", self.health),
            Route("GET", "/health", self.health),
            Route("GET", "/ping", self.health),
            Route("GET", "/info", self.info),
            Route("GET", "/metrics", self.metrics),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/config", self.config, needs_key=True),
            Route("GET", "/api-doc/openapi.json", self.openapi),
            Route("GET", "/docs", self.docs_redirect),
            Route("GET", "/docs/", self.docs),
        ]

    async def health(self, exchange: Exchange, _: Any) -> None:
        await self._services.check_health()
        await exchange.answer(200)

    async def info(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer_json(self._services.facts.info())

    async def models(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer_json(self._services.facts.models())

    async def config(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer_json(self._services.facts.settings)

    async def openapi(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer_json(openapi_document(self._services.facts.version, self._services.facts.platforms))

    async def docs_redirect(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer(303, headers=[(b"location", b"/docs/")])

    async def docs(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer(200, _DOCS_PAGE.read_bytes(), _HTML)

    async def metrics(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer(200, self._services.metrics.render(), _PLAIN_TEXT)
