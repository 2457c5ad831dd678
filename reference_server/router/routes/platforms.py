"""/invocations (SageMaker), /vertex (Vertex AI) and /v2 (KServe): the same generations for cloud platforms."""

import logging
from collections.abc import Sequence
from typing import Any

from reference_server.errors import RequestError, TemplateError, ToolError
from reference_server.router.http_call import HttpCall, HttpError, Route
from reference_server.router.infer import all_or_nothing
from reference_server.router.routes.native import NativeRoutes
from reference_server.router.routes.openai import OpenAiRoutes
from reference_server.router.schemas.openai import ChatRequest, CompletionRequest
from reference_server.router.schemas.platforms import InferOutput, InferRequest, VertexGenerate, VertexRequest
from reference_server.router.schemas.tgi import CompatGenerateRequest, GenerateParameters
from reference_server.router.services import Services
from reference_server.router.telemetry.request_context import RequestContext
from reference_server.router.validation.validator import GenerateCall

logger = logging.getLogger(__name__)

_MODEL = "/v2/models/{name}/versions/{version}"


class PlatformRoutes:
    """Handlers of the platforms' routes, built on those of the native API and of OpenAI's."""

    def __init__(self, services: Services, native: NativeRoutes, openai: OpenAiRoutes) -> None:
        self._services = services
        self._native = native
        self._openai = openai

    def routes(self) -> list[Route]:
        platforms = self._services.info.platforms
        shapes = (CompatGenerateRequest, ChatRequest, CompletionRequest)
        routes = [
            Route("POST", "/invocations", self.invocations, shapes, needs_key=True),
            Route("POST", "/vertex", self.vertex, (VertexRequest,), needs_key=True),
        ]
        if platforms.vertex and platforms.predict_route:
            routes.append(Route("POST", platforms.predict_route, self.vertex, (VertexRequest,)))
        if platforms.vertex and platforms.health_route:
            routes.append(Route("GET", platforms.health_route, self.health))
        return routes + (self._kserve_routes() if platforms.kserve else [])

    def _kserve_routes(self) -> list[Route]:
        return [
            Route("GET", "/v2", self.kserve_server),
            Route("GET", "/v2/health/live", self.kserve_live),
            Route("GET", "/v2/health/ready", self.kserve_live),
            Route("GET", _MODEL, self.kserve_model),
            Route("GET", f"{_MODEL}/ready", self.kserve_live),
            Route("POST", f"{_MODEL}/infer", self.kserve_infer, (InferRequest,)),
        ]

    async def invocations(
        self, http: HttpCall, request: CompatGenerateRequest | ChatRequest | CompletionRequest
    ) -> None:
        match request:
            case CompatGenerateRequest():
                await self._native.compat_generate(http, request)
            case ChatRequest():
                await self._openai.chat(http, request)
            case CompletionRequest():
                await self._openai.completions(http, request)

    async def health(self, http: HttpCall, _: Any) -> None:
        await self._services.check_health()
        await http.answer(200)

    async def vertex(self, http: HttpCall, request: VertexRequest) -> None:
        self._services.metrics.request_count.add(1 + len(request.instances))
        if not request.instances:
            raise HttpError(422, "Input validation error", "Input validation error")
        texts = await _run_all([self._predict(instance, http.context) for instance in request.instances])
        await http.answer_json({"predictions": texts})

    async def kserve_server(self, http: HttpCall, _: Any) -> None:
        extensions = ["health", "models", "metrics"]
        name = "text-generation-inference"
        await http.answer_json({"name": name, "version": self._services.info.version, "extensions": extensions})

    async def kserve_live(self, http: HttpCall, _: Any) -> None:
        await http.answer_json({"live": True})

    async def kserve_model(self, http: HttpCall, _: Any) -> None:
        await http.answer_json({**http.path_params, "extensions": ["infer", "ready"]})

    async def kserve_infer(self, http: HttpCall, request: InferRequest) -> None:
        if len(request.inputs) != len(request.outputs):
            raise HttpError(422, "Inputs and outputs length mismatch", "length mismatch")
        prompts = [_text(bytes(each.data)) for each in request.inputs]
        self._services.metrics.request_count.add(len(prompts))
        outputs: list[dict[str, Any]] = []

        async def answer(prompt: str, output: InferOutput) -> None:
            text = (await self._generate(GenerateCall(prompt, request.parameters, context=http.context))).encode()
            # In the order of completion, as in TGI.
            outputs.append({"name": output.name, "shape": [1, len(text)], "datatype": "BYTES", "data": list(text)})

        await _run_all([answer(prompt, output) for prompt, output in zip(prompts, request.outputs, strict=True)])
        await http.answer_json({"id": request.id, "outputs": outputs})

    async def _predict(self, instance: VertexGenerate | ChatRequest, context: RequestContext) -> str:
        if isinstance(instance, ChatRequest):
            return await self._generate((await self._openai.calls_of(instance, context))[0])
        given = instance.parameters or GenerateParameters()
        parameters = GenerateParameters(
            max_new_tokens=given.max_new_tokens, seed=given.seed, do_sample=True, details=True
        )
        return await self._generate(GenerateCall(instance.inputs, parameters, context=context))

    async def _generate(self, call: GenerateCall) -> str:
        services = self._services
        arrived_ns = services.clock_ns()
        generation = await services.infer.generate(call, arrived_ns)
        services.observe_success(call, arrived_ns, generation.finished)
        return generation.generated.text


async def _run_all(works: Sequence[Any]) -> list[Any]:
    """Their results. Errors other than template and tool errors all become one 500, as in TGI."""
    try:
        return await all_or_nothing(works)
    except (TemplateError, ToolError):
        raise
    except RequestError as error:
        logger.error("%s", error)
        raise HttpError(500, "Incomplete generation", "Incomplete generation") from None


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise HttpError(422, str(error), "utf8") from None
