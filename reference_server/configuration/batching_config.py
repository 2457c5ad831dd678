"""Settings of the router's queue and batches, and the limits of requests."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from reference_server.configuration.common_config import CommonConfig
from reference_server.configuration.config_fields import NonNegative, Positive, Tunable


class BatchingConfig(CommonConfig):
    """Batching"""

    max_concurrent_requests: Annotated[int, Tunable(1, 1024, log=True)] = Field(
        128,
        gt=0,
        description="Largest number of requests that wait or run at once; the router refuses further requests with "
        "status 429.",
    )
    waiting_served_ratio: Annotated[float | None, Tunable(0.05, 3.0, log=True, when="not prefill_chunking")] = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Waiting requests interrupt the running batch for a prefill if their number is at least this ratio "
        "times the number of running requests. Raise it for fewer pauses of running requests; lower it for a shorter "
        "time to first token. No effect with --prefill-chunking.",
    )
    max_batch_prefill_tokens: Annotated[int | None, Tunable(512, 32_768, log=True, multiple_of=64, central=True)] = (
        Field(
            None,
            gt=0,
            description="Largest number of prompt tokens in one prefill. A larger value computes prompts faster; it "
            "takes more memory and delays running requests longer. Unset: in the launcher, the number of tokens that "
            "the GPU computes in one second, otherwise 4096; limited by the model's positions and by the memory.",
        )
    )
    max_batch_total_tokens: Annotated[int | None, Tunable(1024, 1_048_576, log=True, multiple_of=64)] = Field(
        None,
        gt=0,
        description="Largest sum of prompt tokens and generated tokens over all requests of a batch. Unset: as many as "
        "fit in the memory that the warm-up finds.",
    )
    max_waiting_tokens: Annotated[int, Tunable(1, 100, log=True, when="not prefill_chunking", central=True)] = Field(
        20,
        ge=0,
        description="Number of decode steps after which waiting requests interrupt the running batch, however few they "
        "are. No effect with --prefill-chunking.",
    )
    max_best_of: NonNegative = Field(
        2, description="Largest best_of (and n) of a request: the number of answers that are generated for one prompt."
    )
    max_stop_sequences: NonNegative = Field(4, description="Largest number of stop sequences of a request.")
    max_top_n_tokens: NonNegative = Field(
        5, description="Largest top_n_tokens of a request: alternatives that are returned for each token."
    )
    max_client_batch_size: NonNegative = Field(
        4, description="Largest number of prompts in one request of /v1/completions."
    )
    max_requests_per_client: Positive | None = Field(
        None,
        description="Largest number of requests of one client that wait or run at once; the router refuses further "
        "requests with status 429. A client is an API key, or an address if there is none. Unset: no limit.",
    )
    max_queue_time: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Longest time that a request may wait in the queue, in seconds; the router then refuses it with "
        "status 429. Unset: no limit.",
    )
    grpc_schema: Literal["v3", "v2"] = Field(
        "v3",
        description="Version of the gRPC protocol of the model servers. v2 is for model servers of earlier TGI "
        "releases.",
    )
    step_timeout: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Longest time that a step of the model server may take, in seconds; the router then treats the "
        "model server as failed. Unset: 120 on an accelerator, 600 on a CPU.",
    )
    step_trace: Path | None = Field(
        None,
        description="File to which the router writes one row for each step of the model: batch size, tokens, times. "
        "Unset: no file.",
    )
    check_invariants: bool = Field(False, description="Check the scheduler's invariants after every step.")

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
        if self.transport == "link" and self.grpc_schema == "v2":
            raise ValueError("`transport` link needs `grpc_schema` v3: use auto or grpc")
        if self.grpc_schema == "v2" and (self.lora_adapters or self.adapter_directory):
            raise ValueError(
                "`lora_adapters` and `adapter_directory` need `grpc_schema` v3: v2 has no field for a request's adapter"
            )
        total = self.max_batch_total_tokens
        if total is None:
            return self
        for name in ("max_batch_prefill_tokens", "max_total_tokens"):
            value = getattr(self, name)
            if value is not None and value > total:
                raise ValueError(f"`{name}` must be <= `max_batch_total_tokens`. Given: {value} and {total}")
        return self
