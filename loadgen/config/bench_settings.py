"""The fields of a load: TOML keys and flags have their names. `BenchConfig` adds checks and derived values."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

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

from loadgen.config.durations import parse_duration, parse_stages
from loadgen.config.objectives import EXAMPLE as SLO_EXAMPLE
from loadgen.config.objectives import WIDTH_EXAMPLE, parse_objective, parse_width
from loadgen.config.parsing import FILE, REPEATABLE, TIME, Brief, Metavar
from loadgen.config.profiles import DESCRIPTION as PROFILE_DESCRIPTION
from loadgen.config.profiles import ProfileName, with_profile
from loadgen.dialects.registry import API_NAMES
from loadgen.http.response_reader import MAX_RESPONSE_BYTES
from loadgen.http.sse import MAX_LINE_BYTES
from loadgen.target.launched.file_cache import FileCacheState
from loadgen.workloads.adapter_mix import EXAMPLE as ADAPTER_EXAMPLE
from loadgen.workloads.adapter_mix import parse_names, parse_share
from loadgen.workloads.departure import EXAMPLE as DEPARTURE_EXAMPLE
from loadgen.workloads.departure import parse_departure
from loadgen.workloads.lengths import EXAMPLES, Lengths
from loadgen.workloads.prompts.images import SHARED_IMAGES
from loadgen.workloads.prompts.installed import WORKLOAD_NAMES
from loadgen.workloads.prompts.synthetic_image import parse_size
from loadgen.workloads.think_time import EXAMPLES as THINK_TIME_EXAMPLES
from loadgen.workloads.think_time import parse_think_time
from reports.run_store import is_open_loop

Mode = Literal["closed", "constant", "poisson", "gamma", "burst", "stages", "sessions", "trace"]
WorkloadName = Annotated[str, WORKLOAD_NAMES]
ApiName = Annotated[str, API_NAMES]
EngineName = Literal["auto", "own", "tgi", "vllm", "sglang", "llamacpp", "trtllm", "ollama", "anthropic", "openai"]

TRACE_WORKLOADS = ("azure_llm", "burstgpt", "mooncake")
FILE_WORKLOADS = ("prompts", "sharegpt")
RATE_MODES = ("constant", "poisson", "gamma", "sessions")
THINKING_MODES = ("closed", "sessions")

# Documentation lists them as modes, but each is a command of its own.
COMMAND_MODES = ("sweep", "search")

MAX_WORKERS = 1_000
DEFAULT_DURATION_S = 30.0
DEFAULT_WARMUP_S = 3.0
DEFAULT_DRAIN_S = 30.0
DEFAULT_IMAGE_SIZE = "336x336"
DEFAULT_INPUT_TOKENS = "128"
DEFAULT_OUTPUT_TOKENS = "64"
DEFAULT_TURNS = "4"
DEFAULT_PREFIX_TOKENS = 256
DEFAULT_PREFIX_GROUPS = 4
DEFAULT_SHAREGPT_ROWS = 1_000
EMBEDDED_MODEL_ID = "preset:tiny-llama"
EMBEDDED_PERMITS = 1_024
NO_SALT = "off"
# Settings for access to one server, including its secrets.
OF_ACCESS = ("api_key", "api_key_env", "header", "ca_file", "insecure")
# Fields of a request that other settings determine.
FIELDS_OF_LOAD = (
    *("prompt", "messages", "inputs", "stream"),
    *("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", "num_predict", "n"),
)
PROFILE_BRIEF = Brief(
    f"Named load, whose settings other flags override: {', '.join(get_args(ProfileName))}. --help-all describes them."
)


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


def _check_departure(value: str) -> str:
    parse_departure(value)
    return value


def _check_adapter(value: str) -> str:
    parse_share(value)
    return value


def _check_names(value: str) -> str:
    parse_names(value)
    return value


def _check_image_size(value: str) -> str:
    parse_size(value)
    return value


def _check_header(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+=[ -~]*", value.get_secret_value()):
        raise ValueError("must be NAME=VALUE in printable ASCII")
    return value


def _check_variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("must be a variable's name: letters, digits and _, and no digit first")
    return value


def _parse_body(value: object) -> object:
    """A JSON object from text, or from the file after an `@`. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(Path(value[1:]).read_bytes() if value.startswith("@") else value)
    except OSError as error:
        raise ValueError(f"cannot read the file ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object")
    return parsed


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _check_objective(value: str) -> str:
    parse_objective(value)
    return value.strip()


def _check_width(value: str) -> str:
    parse_width(value)
    return value.strip()


AdapterText = Annotated[str, AfterValidator(_check_adapter), Metavar("NAME:SHARE")]
DepartureText = Annotated[str, AfterValidator(_check_departure), Metavar("SHARE@TOKENS")]
Seconds = Annotated[float, BeforeValidator(parse_duration), Field(ge=0, le=7 * 86_400), TIME]
VariableName = Annotated[str, AfterValidator(_check_variable), Metavar("VARIABLE")]
HeaderText = Annotated[SecretStr, AfterValidator(_check_header), Metavar("NAME=VALUE")]
LengthText = Annotated[str, BeforeValidator(_as_text), AfterValidator(_check_lengths), Metavar("LENGTH")]
ObjectiveText = Annotated[str, AfterValidator(_check_objective), Metavar("OBJECTIVE")]
ThinkTimeText = Annotated[str, BeforeValidator(_as_text), AfterValidator(_check_think_time), Metavar("TIME|DIST")]
WidthText = Annotated[str, AfterValidator(_check_width), Metavar("WIDTH")]
FileText = Annotated[str, FILE]
UrlText = Annotated[str, Metavar("URL")]


class BenchSettings(BaseModel):
    """One load and its target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Annotated[ProfileName, PROFILE_BRIEF] | None = Field(None, description=PROFILE_DESCRIPTION)
    mode: Mode = Field(
        "closed",
        description="When requests start. `closed`: each of --concurrency users sends its next request after the "
        "answer. `constant`, `poisson`, `gamma`: at --rate, whether or not the server keeps up. `burst`: all at "
        "once. `stages`: at a rate that follows --stages. `sessions`: conversations start at --rate. `trace`: at "
        "the times of --trace-file.",
    )
    concurrency: int = Field(
        8, ge=1, le=100_000, description="Number of users of a closed loop: requests at the same time."
    )
    rate: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="Requests per second of an open loop; in mode sessions, sessions per second.",
    )
    stages: Annotated[str, AfterValidator(_check_stages), Metavar("STAGES")] | None = Field(
        None,
        description="Load over time, as DURATION:TARGET,…: 30s:8,1m:8,10s:0. The load starts at 0 and changes "
        "linearly to each target, in the unit of --stages-of.",
    )
    stages_of: Literal["rate", "concurrency"] = Field(
        "rate", description="Unit of the targets of --stages: requests per second, or users of a closed loop."
    )
    ramp_up: Seconds = Field(0.0, description="Time over which the users of mode closed start, evenly.")
    burstiness: float = Field(
        1.0,
        gt=0,
        le=1_000,
        description="Shape of gamma arrivals: 1 is Poisson; lower values have more bursts, higher ones are more "
        "regular.",
    )
    duration: Seconds | None = Field(
        None,
        description="Length of the measurement, after the warm-up, such as 20s or 2m. Default 30s; none if "
        "--requests or a trace ends the run.",
    )
    requests: int | None = Field(
        None, ge=1, le=10_000_000, description="Measure the first N requests after the warm-up."
    )
    warmup: Seconds | None = Field(
        None,
        description="Time of load before the measurement, whose requests are in no metric. Default 3s; 0 for "
        "--requests and traces.",
    )
    drain: Seconds | None = Field(
        None,
        description="Longest time that the load continues after the measurement, until the last measured request "
        "has ended. Default 30s; --timeout if --requests or a trace ends the measurement.",
    )
    think_time: ThinkTimeText = Field(
        "0",
        description="Pause between an answer and the next request, in closed loops and sessions: a time or a "
        f"distribution, as in {THINK_TIME_EXAMPLES}.",
    )
    cancel: DepartureText | None = Field(
        None,
        description="Clients that disconnect: fraction of the requests, and the number of tokens after which they "
        f"close their connection, as in {DEPARTURE_EXAMPLE} or 20%@16. Their latencies are in no metric.",
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Largest number of requests of an open loop at the same time. Further ones wait in the client; "
        "the wait is part of their latency. Default no limit.",
    )
    timeout: Seconds = Field(600.0, gt=0, description="Time limit of one request.")
    first_event_timeout: Seconds | None = Field(
        None,
        gt=0,
        description="Longest time from the request's last byte to the first token of a stream; a later request "
        "fails. Default no limit.",
    )
    stall_timeout: Seconds | None = Field(
        None,
        gt=0,
        description="Longest time between two tokens of a stream; a slower request fails. Comments are not tokens. "
        "Default no limit.",
    )
    max_line_bytes: int = Field(
        MAX_LINE_BYTES, ge=1_024, le=2**30, description="Longest accepted line of a stream, in bytes."
    )
    max_response_bytes: int = Field(
        MAX_RESPONSE_BYTES, ge=1_024, le=2**32, description="Largest accepted response, in bytes."
    )
    max_errors: int | None = Field(
        None, ge=1, description="End the run after this number of failed requests. Default no limit."
    )
    max_error_share: float | None = Field(
        None, gt=0, lt=1, description="End the run when more than this fraction of the last 50 requests failed."
    )
    converge: Annotated[tuple[WidthText, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description="End the run when the half-width of a metric's 95 % interval is at most this percentage of its "
        f'value, as in "{WIDTH_EXAMPLE}"; repeatable, all must hold. Checked after --converge-requests, then twice '
        "per doubling.",
    )
    converge_requests: int = Field(100, ge=30, description="Measured requests before the first check of --converge.")
    stop_on_overload: bool = Field(
        False, description="End an open loop when TTFT and requests in flight both keep growing."
    )
    stop_at_attainment: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="End the run when the attainment of every --slo is significantly above or below this fraction.",
    )
    independent_requests: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="End the run, after --least-duration, when its requests have the information of this number of "
        "independent ones: requests that wait in one queue depend on each other. --duration is then the longest "
        "measurement.",
    )
    least_duration: Seconds | None = Field(None, description="Shortest measurement with --independent-requests.")
    unhealthy_probes: int = Field(
        5,
        ge=0,
        le=1_000,
        description="End the run when the server's health route fails this many times in a row; 0: never.",
    )

    slo: Annotated[tuple[ObjectiveText, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description=f'Objective of each request, such as "{SLO_EXAMPLE}"; repeatable. Adds goodput_rps '
        "and slo_attainment.",
    )
    stop_when_missed: Annotated[tuple[ObjectiveText, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description="End the run when a metric misses a limit significantly (99 % bound, after a quarter of the "
        'duration), as in "ttft_p95_ms < 500"; repeatable, one missed limit is enough.',
    )
    cost_per_hour: float | None = Field(
        None, gt=0, description="Price of the server per hour, in any currency. Adds cost_per_mtok."
    )

    workload: WorkloadName = Field("synthetic", description="Source of the prompts.")
    input_tokens: LengthText | None = Field(
        None,
        description="Prompt length, in tokens: of `synthetic`, of the part after the prefix of `shared_prefix`, of "
        f"each question of `multi_turn`. A number or {EXAMPLES}. Default {DEFAULT_INPUT_TOKENS}.",
    )
    output_tokens: LengthText | None = Field(
        None,
        description=f"Answer length, in tokens: a number or a distribution. Default {DEFAULT_OUTPUT_TOKENS}, or the "
        "trace's.",
    )
    length_pairs: FileText | None = Field(
        None,
        description="CSV file of input and output tokens; each request of `synthetic`, `shared_prefix` or `multi_turn` "
        "draws one row, instead of --input-tokens and --output-tokens.",
    )
    prefix_groups: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description=f"Number of different prefixes of `shared_prefix`. Default {DEFAULT_PREFIX_GROUPS}.",
    )
    prefix_tokens: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description=f"Length of each shared prefix, in tokens. Default {DEFAULT_PREFIX_TOKENS}.",
    )
    prefix_popularity: Literal["uniform", "zipf"] | None = Field(
        None,
        description="How often each shared prefix is used. `uniform`: all equally often. `zipf`: a few of them most of "
        "the time. Default uniform.",
    )
    turns: LengthText | None = Field(
        None,
        description="Number of questions in a `multi_turn` session: a number or a distribution. Default "
        f"{DEFAULT_TURNS}.",
    )
    assistant: Literal["scripted", "real"] = Field(
        "scripted",
        description="Earlier answers in the later prompts of `multi_turn`. `scripted`: words of the requested "
        "length, equal for equal seeds. `real`: the server's answers.",
    )
    prefix_cache: Literal["natural", "cold", "warm"] = Field(
        "natural",
        description="State of the server's prefix cache: unchanged (`natural`), without hits (`cold`: every prompt "
        "begins with different words), with every shared prefix (`warm`: each is sent once before the load).",
    )
    structured: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Fraction of the requests whose answer must follow a JSON schema. Every answer is checked; the "
        "report has the share of valid ones, and separate latencies of these and of the other requests.",
    )
    structured_tools: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Fraction of the structured requests that call a tool instead of following a schema. Default 0.",
    )
    schemas_file: FileText | None = Field(
        None, description="JSONL file of objects with `name` and `schema`, drawn evenly. Default three small schemas."
    )
    adapter: Annotated[tuple[AdapterText, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description=f"LoRA adapter and the fraction of the requests that use it, as in {ADAPTER_EXAMPLE}; "
        "repeatable. The other requests use the base model. Native requests have it as `adapter_id`, others as "
        "`model`.",
    )
    adapters: Annotated[str, AfterValidator(_check_names), Metavar("NAMES")] | None = Field(
        None,
        description="LoRA adapters, as a,b,c. Each request uses one of them: all equally often, or by --adapter-zipf.",
    )
    adapter_zipf: float | None = Field(
        None,
        ge=0,
        le=10,
        description="Exponent of a Zipf distribution over --adapters: the first is used most often. Default 0: all "
        "equally often.",
    )
    images: int | None = Field(
        None, ge=1, le=64, description="Images of every request: synthetic PNG files, as data URLs before the text."
    )
    image_size: Annotated[str, AfterValidator(_check_image_size), Metavar("WxH")] | None = Field(
        None, description=f"Width and height of each image in pixels. Default {DEFAULT_IMAGE_SIZE}."
    )
    images_shared: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"Fraction of the images that are one of {SHARED_IMAGES} images, which the server may cache. "
        "Default 0: every image is new.",
    )
    stream: bool = Field(True, description="Request streamed answers. Blocking calls have no TTFT, TPOT or gaps.")
    length_control: Literal["auto", "forced", "capped"] = Field(
        "auto",
        description="Length of answers: exactly the requested one (`forced`, if the server supports it), or at most "
        "that one (`capped`). `auto`: forced if possible.",
    )
    trace_file: FileText | None = Field(
        None, description="CSV or JSONL file of an `azure_llm`, `burstgpt` or `mooncake` trace."
    )
    trace_limit: int | None = Field(
        None,
        ge=1,
        description="Number of requests of the trace to use, after --trace-skip. Default all, of `sharegpt` "
        f"{DEFAULT_SHAREGPT_ROWS}.",
    )
    trace_skip: int = Field(
        0, ge=0, description="Number of requests at the start of the trace (or of `sharegpt`) to skip."
    )
    trace_loop: bool = Field(False, description="Repeat the trace until --duration or --requests end the run.")
    trace_model: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(
        (), description="Only rows of `burstgpt` with this Model, such as ChatGPT; repeatable."
    )
    trace_log_type: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(
        (), description='Only rows of `burstgpt` with this Log Type, such as "API log"; repeatable.'
    )
    block_tokens: int | None = Field(
        None, ge=1, le=1_000_000, description="Prompt tokens for each hash of a `mooncake` trace. Default 512."
    )
    min_input_tokens: int | None = Field(
        None, ge=1, description="Skip requests of a trace or of `sharegpt` with prompts of fewer tokens."
    )
    max_input_tokens: int | None = Field(None, ge=1, description="Skip requests with prompts of more tokens.")
    min_output_tokens: int | None = Field(None, ge=1, description="Skip requests with answers of fewer tokens.")
    max_output_tokens: int | None = Field(None, ge=1, description="Skip requests with answers of more tokens.")
    time_scale: float = Field(
        1.0, gt=0, le=1_000, description="Multiplies every arrival time of a trace: 0.05 is 20 times faster."
    )
    prompts_file: FileText | None = Field(
        None,
        description="File of prompts: JSONL (`prompt`, `text`, `inputs` or `messages`), CSV with such a column, or "
        "one prompt in each line; for `sharegpt`, its JSON file.",
    )
    prompt_column: str | None = Field(
        None, description="Key or column of the prompts in --prompts-file. Default the first of prompt, text, inputs."
    )
    output_tokens_column: str | None = Field(
        None, description="Key or column of --prompts-file that holds the length of each answer."
    )
    prompts_order: Literal["file", "shuffled"] = Field(
        "file", description="Order of the prompts of a file: as in the file, or shuffled by --seed."
    )
    tokenizer: FileText | None = Field(
        None,
        description="tokenizer.json (or its directory) that counts prompt tokens instead of the server's /tokenize.",
    )

    url: UrlText | None = Field(
        None,
        json_schema_extra=REPEATABLE,
        description="URL of a running server to measure. Repeatable: further URLs are replicas of it, and the load is "
        "spread over all; in a file, a list.",
    )
    replicas: Annotated[tuple[UrlText, ...], BeforeValidator(_as_tuple)] = Field(
        (), description="A further URL of the same server; repeatable. A repeated --url does the same."
    )
    balance: Literal["round_robin", "least_in_flight"] = Field(
        "round_robin",
        description="Replica that gets a request: the next one in turn, or the one with the fewest unfinished "
        "requests of this load (each worker counts its own).",
    )
    metrics_url: Annotated[tuple[UrlText, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description="Address of the server's metrics, if it is not --url with /metrics; repeatable, for each "
        "replica. The report has the metrics of each, and their sum.",
    )
    server: Annotated[str, Metavar("COMMAND")] | None = Field(
        None,
        description="Command that starts the server to measure. Free ports are passed in PORT, MASTER_PORT and "
        "PROMETHEUS_PORT; {port} is replaced by PORT.",
    )
    model_id: Annotated[str, Metavar("ID")] = Field(
        EMBEDDED_MODEL_ID,
        min_length=1,
        description="Model of the server that is started if neither --url nor --server is given.",
    )
    api: ApiName = Field("auto", description="API of the requests. Default that of the detected server.")
    engine: EngineName = Field(
        "auto", description="Kind of server, which decides how tokens are counted and lengths forced. Default detected."
    )
    model: str | None = Field(None, description="Model name sent on OpenAI routes. Default the server's first model.")
    api_key: SecretStr | None = Field(
        None, description="Sent as a bearer token. --api-key-env keeps it out of the command line."
    )
    api_key_env: VariableName | None = Field(None, description="Environment variable that holds the API key.")
    header: Annotated[tuple[HeaderText, ...], BeforeValidator(_as_tuple)] = Field(
        (), description="Header of every request, as NAME=VALUE; repeatable. The value is not stored in results."
    )
    extra_body: Annotated[dict[str, Any] | None, BeforeValidator(_parse_body), Metavar("JSON|@FILE")] = Field(
        None,
        description="Further fields of every request's body: a JSON object, or @FILE with one. Objects are merged with "
        """those of the body, as in '{"parameters": {"top_k": 5}}'.""",
    )
    reset_cache: bool = Field(
        False,
        description="Empty the server's prefix cache before the load (vLLM, SGLang, llama.cpp), and confirm it by a "
        "request. Both sides of a comparison can then send the same texts to running servers.",
    )
    ca_file: FileText | None = Field(
        None,
        description="PEM file of the certificate authorities to trust for --url. Default those of the system.",
    )
    insecure: bool = Field(False, description="Do not check the server's certificate.")
    ready_timeout: Seconds = Field(600.0, gt=0, description="Longest time from the start of a server until it answers.")

    file_cache: FileCacheState = Field(
        "natural",
        description="State of the model's files in the page cache at every launch: unchanged (`natural`), dropped "
        "from it (`cold`, by posix_fadvise, without root), or read into it (`warm`). The report has the fraction "
        "that was cached.",
    )
    model_files: Annotated[tuple[FileText, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description="File or folder of weights for --file-cache; repeatable. Default those that the server's command "
        "names.",
    )

    temperature: float | None = Field(None, ge=0, le=100, description="Sampling temperature. Default greedy.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of lengths, arrivals and, with the salt, of texts.")
    salt: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="Text that makes the prompts of a run different from earlier ones, so that the server's prefix "
        "cache does not have them. Default 64 random bits per run. An equal salt gives equal prompts; `off` also "
        "sends the texts of a file unchanged.",
    )
    priority: Literal["auto", "normal"] = Field(
        "auto",
        description="Scheduling of the load generator. `auto`: real-time if permitted, so that its times are "
        "accurate on a machine that the server keeps busy. `normal`: as other processes.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=MAX_WORKERS,
        description="Number of processes on this machine that share the load. Use several if one process is too "
        "slow for it.",
    )
    label: str = Field("", max_length=200, description="Name of this run in tables and reports.")

    @field_validator("mode", mode="before")
    @classmethod
    def _refuse_commands(cls, value: object) -> object:
        if value in COMMAND_MODES:
            raise ValueError(f"{value!r} is a command of its own: tgi-bench {value}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _add_profile(cls, values: object) -> object:
        return with_profile(values) if isinstance(values, dict) else values

    @model_validator(mode="before")
    @classmethod
    def _split_urls(cls, values: object) -> object:
        """The first of several URLs is `url`, the others are `replicas`."""
        if not isinstance(values, dict) or not isinstance(values.get("url"), list | tuple):
            return values
        first, *others = values["url"] or [None]
        return values | {"url": first} | ({"replicas": tuple(others)} if others else {})

    @field_validator("replicas", "metrics_url")
    @classmethod
    def _http_urls(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(cls._http_url(value)) for value in values)

    @field_validator("url")
    @classmethod
    def _http_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value):
            raise ValueError("must look like http://HOST:PORT, without query or credentials")
        return value.rstrip("/")

    @property
    def is_open_loop(self) -> bool:
        return is_open_loop(self.mode, self.stages_of)
