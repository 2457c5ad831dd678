"""Where a request's time went: response headers, histograms and the log line of a success (http-api.md 1.3, 6, 7.2)."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from reference_server.router.batching import Finished
from reference_server.router.infer import Answer
from reference_server.router.metrics import Metrics
from reference_server.router.request_context import CURRENT, Trace
from reference_server.router.schemas.tgi import GenerateParameters
from reference_server.router.sse import Header

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Arrival, queued, first batched, done: nanoseconds of one clock."""

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

    def observe(self, metrics: Metrics, parameters: GenerateParameters, seed: int | None) -> None:
        """Count a success and log it."""
        metrics.request_success.add()
        metrics.request_duration.observe(self.total_ns / 1e9)
        metrics.request_validation_duration.observe(self.validation_ns / 1e9)
        metrics.request_queue_duration.observe(self.queue_ns / 1e9)
        metrics.request_inference_duration.observe(self.inference_ns / 1e9)
        metrics.request_mean_time_per_token_duration.observe(self.per_token_ns / 1e9)
        metrics.request_generated_tokens.observe(self.generated_tokens)
        request = CURRENT.get()
        if logger.isEnabledFor(logging.INFO):
            span = {**self._fields(parameters, seed), "name": request.handler}
            logger.info("Success", extra={"span": span, "spans": [span]})
        if request.trace is not None:
            self._tell_parts(request.trace)

    def _tell_parts(self, trace: Trace) -> None:
        """The parts of a generation that ends now, moved from the batcher's clock to the wall's."""
        offset_ns = time.time_ns() - self.finished_ns
        moments = [self.arrived_ns, self.queued_ns, self.started_ns, self.finished_ns]
        for name, (start_ns, end_ns) in zip(("validate", "queued", "infer"), pairwise(moments), strict=True):
            trace.add_part(name, start_ns + offset_ns, end_ns + offset_ns)

    def _fields(self, parameters: GenerateParameters, seed: int | None) -> dict[str, Any]:
        times = {
            "total_time": self.total_ns,
            "validation_time": self.validation_ns,
            "queue_time": self.queue_ns,
            "inference_time": self.inference_ns,
            "time_per_token": self.per_token_ns,
        }
        spelled = {name: f"{value / 1e6:.3f}ms" for name, value in times.items()}
        asked = parameters.model_dump(exclude_defaults=True)
        return {"parameters": asked, **spelled, "seed": seed}


def timing_headers(times: Sequence[RequestTimes], answers: Sequence[Answer], characters: int) -> list[Header]:
    """The `x-*` headers of a whole answer, summed over its generations; `x-compute-time` is not among them."""

    def milliseconds(values: Sequence[int]) -> int:
        return sum(value // 1_000_000 for value in values)

    numbers = {
        b"x-compute-characters": characters,
        b"x-total-time": milliseconds([each.total_ns for each in times]),
        b"x-validation-time": milliseconds([each.validation_ns for each in times]),
        b"x-queue-time": milliseconds([each.queue_ns for each in times]),
        b"x-inference-time": milliseconds([each.inference_ns for each in times]),
        b"x-time-per-token": milliseconds([each.per_token_ns for each in times]),
        b"x-prompt-tokens": sum(answer.input_len for answer in answers),
        b"x-generated-tokens": sum(answer.generated.generated_tokens for answer in answers),
    }
    return [(name, b"%d" % value) for name, value in numbers.items()]
