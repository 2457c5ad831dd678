"""/info /config /health /ping /ready /metrics /v1/models /docs /api-doc/openapi.json, and GET of /."""

from pathlib import Path
from typing import Any

from reference_server.router.http_call import HttpCall, Route
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
    """Handlers for operators and health probes."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/", self.health),
            Route("GET", "/health", self.health),
            Route("GET", "/ping", self.health),
            Route("GET", "/ready", self.ready),
            Route("GET", "/info", self.info),
            Route("GET", "/metrics", self.metrics),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/config", self.config, needs_key=True),
            Route("GET", "/api-doc/openapi.json", self.openapi),
            Route("GET", "/docs", self.docs_redirect),
            Route("GET", "/docs/", self.docs),
        ]

    async def health(self, http: HttpCall, _: Any) -> None:
        await self._services.check_health()
        await http.answer(200)

    async def ready(self, http: HttpCall, _: Any) -> None:
        await self._services.check_ready()
        await http.answer(200)

    async def info(self, http: HttpCall, _: Any) -> None:
        await http.answer_json(self._services.info.to_json(self._services.adapters.names))

    async def models(self, http: HttpCall, _: Any) -> None:
        await http.answer_json(self._services.info.models(self._services.adapters.names))

    async def config(self, http: HttpCall, _: Any) -> None:
        await http.answer_json(self._services.info.settings)

    async def openapi(self, http: HttpCall, _: Any) -> None:
        info = self._services.info
        await http.answer_json(openapi_document(info.version, info.platforms))

    async def docs_redirect(self, http: HttpCall, _: Any) -> None:
        await http.answer(303, headers=[(b"location", b"/docs/")])

    async def docs(self, http: HttpCall, _: Any) -> None:
        await http.answer(200, _DOCS_PAGE.read_bytes(), _HTML)

    async def metrics(self, http: HttpCall, _: Any) -> None:
        await http.answer(200, self._services.metrics.render(), _PLAIN_TEXT)
