"""`BenchConfig`: the settings of a load, checked together, with the values derived from them."""

import math
import secrets
from typing import Any, Self

from pydantic import model_validator

from loadgen.config.arrival_settings import DEFAULT_DRAIN_S, DEFAULT_DURATION_S, DEFAULT_WARMUP_S
from loadgen.config.bench_settings import NO_SALT, BenchSettings
from loadgen.config.conflicts import conflicts
from loadgen.config.durations import parse_stages
from loadgen.config.target_settings import OF_ACCESS
from loadgen.config.workload_settings import (
    DEFAULT_INPUT_TOKENS,
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_PREFIX_GROUPS,
    DEFAULT_PREFIX_TOKENS,
    DEFAULT_TURNS,
    FILE_WORKLOADS,
    TRACE_WORKLOADS,
)
from loadgen.http.response_reader import CallLimits
from loadgen.redaction import MASK
from loadgen.workloads.shapes import ConstantShape, Shape, StagedUsers


class BenchConfig(BenchSettings):
    """One load and its target."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for is_wrong, problem in conflicts(self):
            if is_wrong:
                raise ValueError(problem)
        return self

    @property
    def has_length_filter(self) -> bool:
        """Whether rows of a file are filtered by length."""
        bounds = (self.min_input_tokens, self.max_input_tokens, self.min_output_tokens, self.max_output_tokens)
        return any(bound is not None for bound in bounds)

    @property
    def has_stop_rules(self) -> bool:
        """Whether the run may end early because of its measurements."""
        is_bounded = bool(self.converge or self.stop_when_missed or self.independent_requests)
        return is_bounded or self.stop_on_overload or self.stop_at_attainment is not None

    @property
    def users(self) -> int:
        """The largest number of users of a closed loop."""
        if self.stages is not None and self.stages_of == "concurrency":
            return math.ceil(max(target for _, target in parse_stages(self.stages)))
        return self.concurrency

    @property
    def shape(self) -> Shape:
        """The users of a closed loop over time."""
        if self.stages is not None and self.stages_of == "concurrency":
            return StagedUsers(parse_stages(self.stages))
        return StagedUsers(((self.ramp_up, self.concurrency),)) if self.ramp_up else ConstantShape(self.concurrency)

    @property
    def duration_s(self) -> float | None:
        """Length of the measurement; None if requests or a trace end it."""
        if self.duration is not None:
            return self.duration
        if self.stages is not None:
            return sum(length_s for length_s, _ in parse_stages(self.stages)) - self.warmup_s
        ends_by_itself = self.requests is not None or (self.workload in TRACE_WORKLOADS and not self.trace_loop)
        return None if ends_by_itself else DEFAULT_DURATION_S

    @property
    def warmup_s(self) -> float:
        if self.warmup is not None or self.stages is not None:
            return self.warmup or 0.0
        return DEFAULT_WARMUP_S if self.duration_s is not None and self.mode not in ("trace", "burst") else 0.0

    @property
    def request_limits(self) -> CallLimits:
        """Limits on the time and size of each request."""
        return CallLimits(
            self.timeout,
            self.first_event_timeout,
            self.stall_timeout,
            line_bytes=self.max_line_bytes,
            response_bytes=self.max_response_bytes,
        )

    @property
    def drain_s(self) -> float:
        if self.drain is not None:
            return self.drain
        return self.timeout if self.duration_s is None else DEFAULT_DRAIN_S

    def salted(self) -> "BenchConfig":
        """The config with a salt: its own, or a new random one."""
        return self if self.salt is not None else self.model_copy(update={"salt": secrets.token_hex(8)})

    @property
    def text_key(self) -> str:
        """The seed of generated texts: `seed` with the salt. Lengths depend on `seed` alone."""
        return str(self.seed) if self.salt in (None, NO_SALT) else f"{self.seed}:{self.salt}"

    def resolved(self) -> dict[str, Any]:
        """Every field as JSON, with derived defaults filled in and secrets masked."""
        filled: dict[str, Any] = {"duration": self.duration_s, "warmup": self.warmup_s, "drain": self.drain_s}
        if self.workload not in (*TRACE_WORKLOADS, *FILE_WORKLOADS) and self.length_pairs is None:
            filled["input_tokens"] = self.input_tokens or DEFAULT_INPUT_TOKENS
        if self.workload == "shared_prefix":
            filled["prefix_groups"] = self.prefix_groups or DEFAULT_PREFIX_GROUPS
            filled["prefix_tokens"] = self.prefix_tokens or DEFAULT_PREFIX_TOKENS
            filled["prefix_popularity"] = self.prefix_popularity or "uniform"
        if self.workload == "multi_turn":
            filled["turns"] = self.turns or DEFAULT_TURNS
        if self.workload not in (*TRACE_WORKLOADS, "sharegpt") and self.length_pairs is None:
            filled["output_tokens"] = self.output_tokens or DEFAULT_OUTPUT_TOKENS
        names = [header.get_secret_value().partition("=")[0] for header in self.header]
        return self.model_dump(mode="json") | filled | {"header": [f"{name}={MASK}" for name in names]}

    def load_description(self) -> dict[str, Any]:
        """The fields that make two loads equal: all but those of the target, the processes and the label."""
        not_of_load = {
            "url",
            "replicas",
            "metrics_url",
            "server",
            "model_id",
            "model",
            *OF_ACCESS,
            "ready_timeout",
            "model_files",
            "label",
            "workers",
            "priority",
            "cost_per_hour",
            "stop_when_missed",
        }
        return self.model_dump(mode="json", exclude=not_of_load)
