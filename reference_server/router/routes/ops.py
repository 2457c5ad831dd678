"""/info /config /health /ping /metrics /v1/models /api-doc/openapi.json, and GET of /."""

from typing import Any

from reference_server.errors import UnhealthyError
from reference_server.router.exchange import Exchange, Route
from reference_server.router.openapi import openapi_document
from reference_server.router.services import Services

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
        ]

    async def health(self, exchange: Exchange, _: Any) -> None:
        if not await self._services.infer.batcher.health():
            raise UnhealthyError
        await exchange.answer(200)

    async def info(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer_json(self._services.facts.info())

    async def models(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer_json(self._services.facts.models())

    async def config(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer_json(self._services.facts.settings)

    async def openapi(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer_json(openapi_document(self._services.facts.version))

    async def metrics(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer(200, self._services.metrics.render(), _PLAIN_TEXT)
