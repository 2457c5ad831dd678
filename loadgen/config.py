"""`BenchConfig`: everything that says what load a run makes and where it goes. Flags and TOML keys are its fields.

Pydantic only; `settings.py` reads the sources.
"""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from loadgen.conflicts import conflicts
from loadgen.datasets.lengths import EXAMPLES, Lengths
from loadgen.durations import parse_duration, parse_stages
from loadgen.limits import MAX_LINE_BYTES, MAX_RESPONSE_BYTES, RequestLimits
from loadgen.modes import COMMAND_MODES, GENERATED_WORKLOADS, TRACE_WORKLOADS, ApiName, Mode, WorkloadName
from loadgen.objectives import EXAMPLE as SLO_EXAMPLE
from loadgen.objectives import WIDTH_EXAMPLE, parse_objective, parse_width
from loadgen.shapes import ConstantShape, Shape, Stages
from loadgen.think_time import EXAMPLES as THINK_TIME_EXAMPLES
from loadgen.think_time import parse_think_time

MAX_WORKERS = 1_000
DEFAULT_DURATION_S = 30.0
DEFAULT_WARMUP_S = 3.0
DEFAULT_DRAIN_S = 30.0
DEFAULT_INPUT_TOKENS = "128"
DEFAULT_OUTPUT_TOKENS = "64"
DEFAULT_TURNS = "4"
DEFAULT_PREFIX_TOKENS = 256
DEFAULT_PREFIX_GROUPS = 4
DEFAULT_SHAREGPT_ROWS = 1_000
EMBEDDED_MODEL_ID = "preset:tiny-llama"
EMBEDDED_PERMITS = 1_024


def _as_text(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if is_number else value


def _check_lengths(value: str) -> str:
    return str(Lengths.parse(value))


def _check_stages(value: str) -> str:
    parse_stages(value)
    return value


def _check_think_time(value: str) -> str:
    parse_think_time(value)
    return value


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _check_objective(value: str) -> str:
    parse_objective(value)
    return value.strip()


def _check_width(value: str) -> str:
    parse_width(value)
    return value.strip()


Seconds = Annotated[float, BeforeValidator(parse_duration), Field(ge=0, le=7 * 86_400)]
LengthText = Annotated[str, BeforeValidator(_as_text), AfterValidator(_check_lengths)]
ObjectiveText = Annotated[str, AfterValidator(_check_objective)]
ThinkTimeText = Annotated[str, BeforeValidator(_as_text), AfterValidator(_check_think_time)]
WidthText = Annotated[str, AfterValidator(_check_width)]


class BenchConfig(BaseModel):
    """One load and its target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = Field(
        "closed",
        description="How requests start: `closed` (each user waits for its answer), `constant`, `poisson` or `gamma` "
        "arrivals at --rate, `burst` (all at once), `stages` (a rate that follows --stages), `sessions` (conversations "
        "start at --rate, turns follow one another), `trace` (at the times of --trace-file).",
    )
    concurrency: int = Field(8, ge=1, le=100_000, description="Users of the closed loop.")
    rate: float | None = Field(
        None, gt=0, le=1_000_000, description="Requests (or sessions) per second of an open loop."
    )
    stages: Annotated[str, AfterValidator(_check_stages)] | None = Field(
        None, description="Rate (or users) in straight lines from 0, as DURATION:TARGET,…: 30s:8,1m:8,10s:0."
    )
    stages_of: Literal["rate", "concurrency"] = Field(
        "rate", description="What --stages sets: requests/s of an open loop, or the users of a closed one."
    )
    ramp_up: Seconds = Field(0.0, description="Time over which the users of mode closed arrive.")
    burstiness: float = Field(
        1.0, gt=0, le=1_000, description="Shape of gamma arrivals: 1 is Poisson, below 1 burstier."
    )
    duration: Seconds | None = Field(
        None,
        description="Length of the measurement, after the warm-up: 20s, 2m. Default 30s where neither --requests nor a "
        "trace ends the run.",
    )
    requests: int | None = Field(None, ge=1, le=10_000_000, description="End after this many measured requests.")
    warmup: Seconds | None = Field(
        None,
        description="Load that is not counted, before the measurement. Default 3s, none for --requests and traces.",
    )
    drain: Seconds | None = Field(
        None,
        description="How long requests in flight may go on after the last one was sent. Default 30s after a timed "
        "measurement, as long as --timeout where --requests or a trace ends the run.",
    )
    think_time: ThinkTimeText = Field(
        "0",
        description="Pause of a user between answer and next request, closed loop and sessions: a time or a "
        f"distribution, as in {THINK_TIME_EXAMPLES}.",
    )
    max_in_flight: int | None = Field(
        None, ge=1, le=100_000, description="Most requests of an open loop in flight; waiting there is part of latency."
    )
    timeout: Seconds = Field(600.0, gt=0, description="Limit of one request.")
    first_event_timeout: Seconds | None = Field(
        None, gt=0, description="Limit on the first token of a stream, from the request's last byte on."
    )
    stall_timeout: Seconds | None = Field(
        None, gt=0, description="Limit on the time between two tokens of a stream; comments are no tokens."
    )
    max_line_bytes: int = Field(MAX_LINE_BYTES, ge=1_024, le=2**30, description="Longest line of a stream.")
    max_response_bytes: int = Field(MAX_RESPONSE_BYTES, ge=1_024, le=2**32, description="Largest response.")
    max_errors: int | None = Field(None, ge=1, description="End the run after this many failed requests.")
    max_error_share: float | None = Field(
        None, gt=0, lt=1, description="End the run when more than this share of the last 50 requests failed."
    )
    converge: Annotated[tuple[WidthText, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description="End the run once the 95 % interval of a metric is at most so wide to either side: "
        f'"{WIDTH_EXAMPLE}"; repeatable, all must be. Looked at after --converge-requests, then at every doubling.',
    )
    converge_requests: int = Field(100, ge=30, description="Fewest measured requests for --converge.")
    stop_on_overload: bool = Field(
        False, description="End an open loop when TTFT and requests in flight both keep growing."
    )
    stop_at_attainment: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="End the run when the share of requests that meet every --slo is surely above or below this.",
    )
    unhealthy_probes: int = Field(
        5, ge=0, le=1_000, description="End the run when the server's /health fails so many times in a row; 0: never."
    )

    slo: Annotated[tuple[ObjectiveText, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description=f'Objective that requests are judged by, such as "{SLO_EXAMPLE}"; repeatable. Gives goodput_rps '
        "and slo_attainment.",
    )
    stop_when_missed: Annotated[tuple[ObjectiveText, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description="End the run once a metric surely misses a value, by its 99 % bound after a quarter of the "
        'duration: "ttft_p95_ms < 500"; repeatable, one is enough.',
    )
    cost_per_hour: float | None = Field(
        None, gt=0, description="Price of the server per hour, in any currency. Gives cost_per_mtok."
    )

    workload: WorkloadName = Field("synthetic", description="What the prompts are.")
    input_tokens: LengthText | None = Field(
        None,
        description=f"Prompt length of `synthetic`, of the unique part of `shared_prefix`, of each question of "
        f"`multi_turn`: a number or {EXAMPLES}. Default {DEFAULT_INPUT_TOKENS}.",
    )
    output_tokens: LengthText | None = Field(
        None, description=f"Answer length: a number or a distribution. Default {DEFAULT_OUTPUT_TOKENS}, or the trace's."
    )
    length_pairs: str | None = Field(
        None,
        description="CSV file of input and output tokens; each request of `synthetic`, `shared_prefix` or `multi_turn` "
        "draws one row, in place of --input-tokens and --output-tokens.",
    )
    prefix_groups: int | None = Field(
        None, ge=1, le=100_000, description=f"Shared prefixes of `shared_prefix`. Default {DEFAULT_PREFIX_GROUPS}."
    )
    prefix_tokens: int | None = Field(
        None, ge=1, le=10_000_000, description=f"Length of each shared prefix. Default {DEFAULT_PREFIX_TOKENS}."
    )
    prefix_popularity: Literal["uniform", "zipf"] | None = Field(
        None, description="How often each shared prefix is used. Default uniform."
    )
    turns: LengthText | None = Field(
        None, description=f"Questions of a `multi_turn` session: a number or a distribution. Default {DEFAULT_TURNS}."
    )
    assistant: Literal["scripted", "real"] = Field(
        "scripted",
        description="What the turns of `multi_turn` repeat as the server's answers: words of the length that was asked "
        "for, the same for a seed, or what it really answered.",
    )
    prefix_cache: Literal["natural", "cold", "warm"] = Field(
        "natural",
        description="What the server's prefix cache finds: what it finds (`natural`), nothing (`cold`: every prompt "
        "begins with words of its own), every shared prefix (`warm`: each is sent once before the load).",
    )
    stream: bool = Field(True, description="Whether answers are streamed; blocking calls have no TTFT, TPOT or gaps.")
    length_control: Literal["auto", "forced", "capped"] = Field(
        "auto",
        description="Whether answers are made exactly as long as asked (`forced`, where the server says it can) or at "
        "most that long (`capped`). `auto` forces where possible.",
    )
    trace_file: str | None = Field(
        None, description="CSV or JSONL file of an `azure_llm`, `burstgpt` or `mooncake` trace."
    )
    trace_limit: int | None = Field(
        None,
        ge=1,
        description=f"Use only the first requests of the trace. Default all, of `sharegpt` {DEFAULT_SHAREGPT_ROWS}.",
    )
    trace_skip: int = Field(0, ge=0, description="Leave out the first requests of the trace (or of `sharegpt`).")
    trace_loop: bool = Field(
        False, description="Begin the trace again when it ends, until --duration or --requests end the run."
    )
    trace_model: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(
        (), description="Only rows of `burstgpt` whose Model is this, such as ChatGPT; repeatable."
    )
    trace_log_type: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(
        (), description='Only rows of `burstgpt` whose Log Type is this, such as "API log"; repeatable.'
    )
    block_tokens: int | None = Field(
        None, ge=1, le=1_000_000, description="Prompt tokens that one hash of `mooncake` stands for. Default 512."
    )
    min_input_tokens: int | None = Field(
        None, ge=1, description="Leave out requests of a trace or of `sharegpt` with shorter prompts."
    )
    max_input_tokens: int | None = Field(None, ge=1, description="Leave out those with longer prompts.")
    min_output_tokens: int | None = Field(None, ge=1, description="Leave out those with shorter answers.")
    max_output_tokens: int | None = Field(None, ge=1, description="Leave out those with longer answers.")
    time_scale: float = Field(
        1.0, gt=0, le=1_000, description="Multiplies every arrival time of a trace: 0.05 is 20 times faster."
    )
    prompts_file: str | None = Field(
        None,
        description="JSONL (`prompt`, `text`, `inputs` or `messages`), CSV with such a column, or one a line; the JSON "
        "file of `sharegpt`.",
    )
    prompt_column: str | None = Field(
        None, description="Key or column of the prompts in --prompts-file. Default the first of prompt, text, inputs."
    )
    output_tokens_column: str | None = Field(
        None, description="Key or column of --prompts-file that holds the length of each answer."
    )
    prompts_order: Literal["file", "shuffled"] = Field(
        "file", description="Order of the prompts of a file: its own, or one that --seed decides."
    )
    tokenizer: str | None = Field(
        None, description="tokenizer.json (or its directory) that counts prompt tokens in place of the server's route."
    )

    url: str | None = Field(None, description="Drive the server at this address.")
    server: str | None = Field(
        None, description="Start this command and drive it. It finds free ports in its environment; {port} is replaced."
    )
    model_id: str = Field(
        EMBEDDED_MODEL_ID,
        min_length=1,
        description="Model of the server that is started when neither --url nor --server is given.",
    )
    api: ApiName = Field("auto", description="Dialect of the server.")
    model: str | None = Field(None, description="Model name sent on OpenAI routes. Default what the server names.")
    api_key: SecretStr | None = Field(None, description="Sent as a bearer token.")
    ready_timeout: Seconds = Field(600.0, gt=0, description="How long a started server may take to answer.")

    temperature: float | None = Field(None, ge=0, le=100, description="Sampling temperature; greedy when not given.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of prompts, lengths and arrivals.")
    priority: Literal["auto", "normal"] = Field(
        "auto",
        description="Whether the load generator asks the system to be run before other processes (`auto`: where it "
        "may), so that times are right on a machine that the server keeps busy.",
    )
    workers: int = Field(
        1, ge=1, le=MAX_WORKERS, description="Processes of this machine that make the load; each gets its share of it."
    )
    label: str = Field("", max_length=200, description="Name of this run in tables and reports.")

    @field_validator("mode", mode="before")
    @classmethod
    def _refuse_commands(cls, value: object) -> object:
        if value in COMMAND_MODES:
            raise ValueError(f"{value!r} is a command of its own: tgi-bench {value}")
        return value

    @field_validator("url")
    @classmethod
    def _http_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value):
            raise ValueError("must look like http://HOST:PORT, without query or credentials")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for is_wrong, problem in conflicts(self):
            if is_wrong:
                raise ValueError(problem)
        return self

    @property
    def has_length_filter(self) -> bool:
        """Whether rows of a file are left out for their lengths."""
        bounds = (self.min_input_tokens, self.max_input_tokens, self.min_output_tokens, self.max_output_tokens)
        return any(bound is not None for bound in bounds)

    @property
    def has_stop_rules(self) -> bool:
        """Whether the run may end by what it measured so far."""
        is_bounded = bool(self.converge or self.stop_when_missed)
        return is_bounded or self.stop_on_overload or self.stop_at_attainment is not None

    @property
    def is_open_loop(self) -> bool:
        return self.mode != "closed" and not (self.mode == "stages" and self.stages_of == "concurrency")

    @property
    def users(self) -> int:
        """Most users of a closed loop."""
        if self.stages is not None and self.stages_of == "concurrency":
            return math.ceil(max(target for _, target in parse_stages(self.stages)))
        return self.concurrency

    @property
    def shape(self) -> Shape:
        """The users of a closed loop over time."""
        if self.stages is not None and self.stages_of == "concurrency":
            return Stages(parse_stages(self.stages))
        return Stages(((self.ramp_up, self.concurrency),)) if self.ramp_up else ConstantShape(self.concurrency)

    @property
    def duration_s(self) -> float | None:
        """Length of the measurement; None where requests or a trace end it."""
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
    def request_limits(self) -> RequestLimits:
        """How long each request may take and how much its answer may hold."""
        return RequestLimits(
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

    def resolved(self) -> dict[str, Any]:
        """Every field as JSON, with what was left to a default filled in and secrets masked."""
        filled: dict[str, Any] = {"duration": self.duration_s, "warmup": self.warmup_s, "drain": self.drain_s}
        if self.workload in GENERATED_WORKLOADS and self.length_pairs is None:
            filled["input_tokens"] = self.input_tokens or DEFAULT_INPUT_TOKENS
        if self.workload == "shared_prefix":
            filled["prefix_groups"] = self.prefix_groups or DEFAULT_PREFIX_GROUPS
            filled["prefix_tokens"] = self.prefix_tokens or DEFAULT_PREFIX_TOKENS
            filled["prefix_popularity"] = self.prefix_popularity or "uniform"
        if self.workload == "multi_turn":
            filled["turns"] = self.turns or DEFAULT_TURNS
        if self.workload not in (*TRACE_WORKLOADS, "sharegpt") and self.length_pairs is None:
            filled["output_tokens"] = self.output_tokens or DEFAULT_OUTPUT_TOKENS
        return self.model_dump(mode="json") | filled

    def load_description(self) -> dict[str, Any]:
        """What makes two loads the same: every field but the target's and the label."""
        elsewhere = {
            "url",
            "server",
            "model_id",
            "model",
            "api_key",
            "ready_timeout",
            "label",
            "workers",
            "priority",
            "cost_per_hour",
            "stop_when_missed",
        }
        return self.model_dump(mode="json", exclude=elsewhere)
