"""/v1/load_lora_adapter /v1/unload_lora_adapter: adapters at run time, with vLLM's requests and answers."""

from reference_server.router.http_call import HttpCall, Route
from reference_server.router.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from reference_server.router.served_adapters import Adapters
from reference_server.router.sse import Header

_PLAIN_TEXT: list[Header] = [(b"content-type", b"text/plain; charset=utf-8")]


class AdapterRoutes:
    """Handlers for operators. They need the API key if one is set."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/load_lora_adapter", self.load, (LoadAdapterRequest,), needs_key=True),
            Route("POST", "/v1/unload_lora_adapter", self.unload, (UnloadAdapterRequest,), needs_key=True),
        ]

    async def load(self, http: HttpCall, request: LoadAdapterRequest) -> None:
        await self._adapters.load(request.lora_name, request.lora_path, replaces=request.load_inplace)
        await self._answer(http, f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    async def unload(self, http: HttpCall, request: UnloadAdapterRequest) -> None:
        await self._adapters.unload(request.lora_name)
        await self._answer(http, f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    async def _answer(self, http: HttpCall, text: str) -> None:
        await http.answer(200, text.encode(), _PLAIN_TEXT)
