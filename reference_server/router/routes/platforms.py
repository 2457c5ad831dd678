"""/invocations (SageMaker), /vertex (Vertex AI) and /v2 (KServe): other clouds' names for the same generations."""

import logging
from collections.abc import Sequence
from typing import Any

from reference_server.errors import RequestError, TemplateError, ToolError
from reference_server.router.exchange import Exchange, Refusal, Route
from reference_server.router.infer import all_or_nothing
from reference_server.router.routes.generate import GenerateRoutes
from reference_server.router.routes.openai import OpenAiRoutes
from reference_server.router.schemas.openai import ChatRequest, CompletionRequest
from reference_server.router.schemas.platforms import InferOutput, InferRequest, VertexGenerate, VertexRequest
from reference_server.router.schemas.tgi import CompatGenerateRequest, GenerateParameters
from reference_server.router.services import Services
from reference_server.router.times import RequestTimes
from reference_server.router.validation import GenerateCall

logger = logging.getLogger(__name__)

_MODEL = "/v2/models/{name}/versions/{version}"


class PlatformRoutes:
    """Handlers of the platforms' routes; they stand on those of the native API and of OpenAI's."""

    def __init__(self, services: Services, generate: GenerateRoutes, openai: OpenAiRoutes) -> None:
        self._services = services
        self._generate = generate
        self._openai = openai

    def routes(self) -> list[Route]:
        platforms = self._services.facts.platforms
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
        self, exchange: Exchange, request: CompatGenerateRequest | ChatRequest | CompletionRequest
    ) -> None:
        match request:
            case CompatGenerateRequest():
                await self._generate.compat_generate(exchange, request)
            case ChatRequest():
                await self._openai.chat(exchange, request)
            case CompletionRequest():
                await self._openai.completions(exchange, request)

    async def health(self, exchange: Exchange, _: Any) -> None:
        await self._services.check_health()
        await exchange.answer(200)

    async def vertex(self, exchange: Exchange, request: VertexRequest) -> None:
        self._services.metrics.request_count.add(1 + len(request.instances))
        if not request.instances:
            raise Refusal(422, "Input validation error", "Input validation error")
        texts = await _run_all([self._predict(instance) for instance in request.instances])
        await exchange.answer_json({"predictions": texts})

    async def kserve_server(self, exchange: Exchange, _: Any) -> None:
        extensions = ["health", "models", "metrics"]
        name = "text-generation-inference"
        await exchange.answer_json({"name": name, "version": self._services.facts.version, "extensions": extensions})

    async def kserve_live(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer_json({"live": True})

    async def kserve_model(self, exchange: Exchange, _: Any) -> None:
        await exchange.answer_json({**exchange.path_params, "extensions": ["infer", "ready"]})

    async def kserve_infer(self, exchange: Exchange, request: InferRequest) -> None:
        if len(request.inputs) != len(request.outputs):
            raise Refusal(422, "Inputs and outputs length mismatch", "length mismatch")
        prompts = [_text(bytes(each.data)) for each in request.inputs]
        self._services.metrics.request_count.add(len(prompts))
        outputs: list[dict[str, Any]] = []

        async def answer(prompt: str, output: InferOutput) -> None:
            text = (await self._generate_text(GenerateCall(prompt, request.parameters))).encode()
            # In the order in which they end, as in TGI.
            outputs.append({"name": output.name, "shape": [1, len(text)], "datatype": "BYTES", "data": list(text)})

        await _run_all([answer(prompt, output) for prompt, output in zip(prompts, request.outputs, strict=True)])
        await exchange.answer_json({"id": request.id, "outputs": outputs})

    async def _predict(self, instance: VertexGenerate | ChatRequest) -> str:
        if isinstance(instance, ChatRequest):
            return await self._generate_text((await self._openai.chat_runs(instance))[0])
        asked = instance.parameters or GenerateParameters()
        parameters = GenerateParameters(
            max_new_tokens=asked.max_new_tokens, seed=asked.seed, do_sample=True, details=True
        )
        return await self._generate_text(GenerateCall(instance.inputs, parameters))

    async def _generate_text(self, call: GenerateCall) -> str:
        services = self._services
        arrived_ns = services.clock_ns()
        answer = await services.infer.generate(call)
        times = RequestTimes.of(arrived_ns, answer.finished, services.clock_ns())
        times.observe(services.metrics, call.parameters, answer.generated.seed)
        return answer.generated.text


async def _run_all(works: Sequence[Any]) -> list[Any]:
    """Their results; any failure but of a template or a tool is told as one and the same, as in TGI."""
    try:
        return await all_or_nothing(works)
    except (TemplateError, ToolError):
        raise
    except RequestError as error:
        logger.error("%s", error)
        raise Refusal(500, "Incomplete generation", "Incomplete generation") from None


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Refusal(422, str(error), "utf8") from None
