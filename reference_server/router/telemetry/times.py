"""The stages of a request in time: response headers, histograms and the log line of a success."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reference_server.router.generation_stream import Finished
from reference_server.router.schemas.tgi import GenerateParameters
from reference_server.router.sse import Header
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.telemetry.request_context import RequestContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Arrival, queued, first batched, finished: nanoseconds of one clock."""

    arrived_ns: int
    queued_ns: int
    started_ns: int
    finished_ns: int
    generated_tokens: int

    @classmethod
    def of(cls, arrived_ns: int, end: Finished, now_ns: int) -> "RequestTimes":
        return cls(arrived_ns, end.queued_ns, end.started_ns, now_ns, end.generated_text.generated_tokens)

    @property
    def total_ns(self) -> int:
        return self.finished_ns - self.arrived_ns

    @property
    def validation_ns(self) -> int:
        return self.queued_ns - self.arrived_ns

    @property
    def queue_ns(self) -> int:
        return self.started_ns - self.queued_ns

    @property
    def inference_ns(self) -> int:
        return self.finished_ns - self.started_ns

    @property
    def per_token_ns(self) -> int:
        return self.inference_ns // max(1, self.generated_tokens)

    @property
    def compute_time(self) -> Header:
        return b"x-compute-time", repr(self.total_ns / 1e9).encode()

    def observe(
        self, metrics: Metrics, context: RequestContext, parameters: GenerateParameters, seed: int | None
    ) -> None:
        """Count a success, and log it for debugging."""
        metrics.request_success.add()
        metrics.request_duration.observe(self.total_ns / 1e9)
        metrics.request_validation_duration.observe(self.validation_ns / 1e9)
        metrics.request_queue_duration.observe(self.queue_ns / 1e9)
        metrics.request_inference_duration.observe(self.inference_ns / 1e9)
        metrics.request_mean_time_per_token_duration.observe(self.per_token_ns / 1e9)
        metrics.request_generated_tokens.observe(self.generated_tokens)
        if logger.isEnabledFor(logging.DEBUG):
            span = {**self._fields(parameters, seed), "name": context.handler}
            logger.debug("Success", extra={"span": span, "spans": [span]})

    def _fields(self, parameters: GenerateParameters, seed: int | None) -> dict[str, Any]:
        times = {
            "total_time": self.total_ns,
            "validation_time": self.validation_ns,
            "queue_time": self.queue_ns,
            "inference_time": self.inference_ns,
            "time_per_token": self.per_token_ns,
        }
        in_ms = {name: f"{value / 1e6:.3f}ms" for name, value in times.items()}
        return {"parameters": parameters.model_dump(exclude_defaults=True), **in_ms, "seed": seed}


def timing_headers(
    times: Sequence[RequestTimes], characters: int, prompt_tokens: int, generated_tokens: int
) -> list[Header]:
    """The `x-*` headers of a whole answer, times summed over its generations; without `x-compute-time`."""

    def milliseconds(values: Sequence[int]) -> int:
        return sum(value // 1_000_000 for value in values)

    numbers = {
        b"x-compute-characters": characters,
        b"x-total-time": milliseconds([each.total_ns for each in times]),
        b"x-validation-time": milliseconds([each.validation_ns for each in times]),
        b"x-queue-time": milliseconds([each.queue_ns for each in times]),
        b"x-inference-time": milliseconds([each.inference_ns for each in times]),
        b"x-time-per-token": milliseconds([each.per_token_ns for each in times]),
        b"x-prompt-tokens": prompt_tokens,
        b"x-generated-tokens": generated_tokens,
    }
    return [(name, b"%d" % value) for name, value in numbers.items()]
