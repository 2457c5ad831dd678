"""Every setting of the launcher, the router and the model server, declared once.

A field is a flag (`--max-total-tokens`), a variable (`MAX_TOTAL_TOKENS`), a TOML key (`max_total_tokens`) and a row of
docs/settings.md. `settings.py` reads these sources; this module imports pydantic only and reads nothing.

    HubConfig ── CommonConfig ─┬─ ModelConfig ─────┬──────── ShardConfig       text-generation-server serve
       │                       ├─ BatchingConfig ──┼──┬───── RouterConfig      text-generation-router
       │                       ├─ HttpConfig ──────┼──┘
       │                       └─ ProcessConfig ───┴──────── ServerConfig      text-generation-launcher
       ├─ DownloadConfig                                        text-generation-server download-weights
       ├─ QuantizeConfig                                                text-generation-server quantize
       └─ BenchmarkConfig, in config_benchmark.py                       text-generation-benchmark

A default that depends on the command is `None` here and is listed in `COMMAND_DEFAULTS`; one that depends on the model
or the device is resolved in `launcher/plan.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reference_server.configuration.config_fields import (
    FieldSource,
    Integers,
    NonNegative,
    Port,
    Positive,
    Strings,
    TrueOrFalse,
    Words,
    argv_of,
    environ_of,
)
from reference_server.configuration.config_fields import Secret as Secret
from reference_server.configuration.config_fields import Tunable as Tunable
from reference_server.configuration.config_fields import tunables as tunables

Quantize = Literal[
    "awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "bitsandbytes-nf4",
    "bitsandbytes-fp4", "fp8", "int4",
]  # fmt: skip
Dtype = Literal["float16", "bfloat16", "float32"]
KVCacheDtype = Literal["fp8_e4m3fn", "fp8_e5m2"]
Transport = Literal["auto", "grpc", "link"]
Attention = Literal[
    "auto", "torch", "varlen", "triton", "flash", "paged", "flashdecoding", "flashdecoding-ipex", "flashinfer"
]  # fmt: skip

BITSANDBYTES = ("bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4")
PLAIN_CHOICES = ("none", "eetq", "int4", "fp8", *BITSANDBYTES)
"""Values of `quantize` for a plain checkpoint."""
DEFAULT_SOCKET_PREFIX = "/tmp/text-generation-server"

Command = Literal["launcher", "router", "serve", "download-weights", "quantize", "benchmark"]

# Defaults that differ by command. Other fields stay `None`, which means "computed" or "none".
COMMAND_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "launcher": {
        "model_id": "bigscience/bloom-560m",
        "waiting_served_ratio": 0.3,
        "otlp_service_name": "text-generation-inference.router",
    },
    "router": {
        "tokenizer_name": "bigscience/bloom",
        "waiting_served_ratio": 1.2,
        "max_batch_prefill_tokens": 4096,
        "otlp_service_name": "text-generation-inference.router",
    },
    "serve": {"otlp_service_name": "text-generation-inference.server"},
}
# Length limits with wire schema v2; with v3 the warm-up finds them.
SCHEMA_V2_DEFAULTS: Mapping[str, object] = {"max_input_tokens": 1024, "max_total_tokens": 2048}


PositionalModel = Annotated[
    str,
    FieldSource(positional=True),
    Field(pattern=r"^[^-]", description="Hub repository, local directory, or a built-in `preset:NAME`."),
]
LoggerLevel = Annotated[str, FieldSource(env=()), Field(description="Log level.")]

Part = TypeVar("Part", bound=BaseModel)


class HubConfig(BaseModel):
    """Hub and logs"""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    command: ClassVar[Command]
    # Command lines at the end of `--help`.
    examples: ClassVar[tuple[str, ...]] = ()

    config_file: Path | None = Field(None, description="TOML file of settings; variables and flags override it.")
    revision: str | None = Field(None, description="Branch, tag, PR ref or commit of the hub repository.")
    trust_remote_code: bool = Field(
        False, description="Run code from the model's repository, and convert pickled weights."
    )
    huggingface_hub_cache: Path | None = Field(None, description="Cache directory of the model hub.")
    weights_cache_override: Path | None = Field(
        None, description="Directory of weight files, used instead of the cache."
    )
    hub_token: Annotated[
        Secret | None, FieldSource(flag=False, env=("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    ] = Field(None, description="Token of the model hub; child processes get it as HF_TOKEN.")
    json_output: bool = Field(False, description="Log JSON lines instead of text.")
    log_level: Annotated[str, FieldSource(flag=False)] = Field("info", description="Log level or filter.")

    def to_argv(self) -> list[str]:
        """The command line of this configuration, without secrets: `to_environ` has them."""
        return argv_of(self)

    def to_environ(self) -> dict[str, str]:
        """The environment variables that complete `to_argv`: secrets and settings without a flag."""
        return environ_of(self)

    def part(self, part: type[Part], **changes: object) -> Part:
        """The settings that `part` shares with this class, with `changes`."""
        shared = {name: getattr(self, name) for name in part.model_fields if name in type(self).model_fields}
        return part.model_validate(shared | changes)


class CommonConfig(HubConfig):
    """Shared by router and model server"""

    max_input_tokens: Positive | None = Field(
        None, description="Longest accepted prompt, in tokens. Unset: measured by the warm-up."
    )
    max_total_tokens: Positive | None = Field(
        None, description="Largest sum of prompt and new tokens of a request. Unset: measured by the warm-up."
    )
    max_batch_size: Annotated[int | None, Tunable(1, 512, log=True)] = Field(
        None, description="Largest number of requests in a batch."
    )
    lora_adapters: Words = Field(
        (),
        description="LoRA adapters, loaded at start: id, id@revision, name=path, name=id or name=id@revision. A request"
        " selects one by its name; preset:NAME is a built-in one.",
    )
    adapter_directory: Path | None = Field(
        None,
        description="Adapters in directories below this one can be loaded and unloaded at run time"
        " (/v1/load_lora_adapter, /v1/unload_lora_adapter). Unset: those routes are refused.",
    )
    adapter_memory_mib: Positive = Field(
        256,
        description="With --adapter-directory: the most memory of all adapters of a shard, taken from that of the K/V"
        " cache.",
    )
    max_adapters: Positive = Field(64, description="Most adapters loaded at once.")
    shard_addr: Words = Field((), description="TCP addresses of the model servers, host:port in rank order.")
    transport: Annotated[Transport, FieldSource(env=("SHARD_TRANSPORT",))] = Field(
        "auto",
        description="Wire between the router and model servers on unix sockets: link (frames on a second socket), or"
        " gRPC. auto: link where the model server offers it. TCP addresses and schema v2 use gRPC.",
    )
    otlp_endpoint: str | None = Field(None, description="Address of the trace collector.")
    otlp_service_name: str | None = Field(None, description="Service name in traces.")

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if len(self.lora_adapters) > self.max_adapters:
            raise ValueError(
                f"`lora_adapters` has {len(self.lora_adapters)} adapters, but `max_adapters` is {self.max_adapters}"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.max_batch_size == 0:
            raise ValueError("`max_batch_size` must be > 0")
        if self.max_input_tokens and self.max_total_tokens and self.max_input_tokens >= self.max_total_tokens:
            raise ValueError("`max_input_tokens` must be < `max_total_tokens`")
        if self.transport == "link" and self.shard_addr:
            raise ValueError("`transport` link needs unix sockets, but `shard_addr` is set: use auto or grpc")
        return self


class ModelConfig(CommonConfig):
    """Model, memory and kernels"""

    model_id: Annotated[str | None, FieldSource()] = Field(
        None, min_length=1, description="Hub repository, local directory, or a built-in `preset:NAME`."
    )
    quantize: Annotated[Quantize | None, Tunable(choices=PLAIN_CHOICES, central=True)] = Field(
        None, description="Quantize the weights; a quantized checkpoint needs no flag."
    )
    speculate: Annotated[int | None, Tunable(0, 8)] = Field(
        None,
        ge=0,
        description="Most draft tokens of a request and step, which the step verifies: of the heads of a speculator, or"
        " else from n-gram lookup. 0: no drafts. Unset: all heads of a speculator, otherwise none.",
    )
    speculate_adaptive: Annotated[bool, FieldSource(takes_value=True, digits=True)] = Field(
        True,
        description="Draft only where the measured time of a step and the accepted drafts of a request make it pay;"
        " false: every draft has --speculate tokens.",
    )
    ngram_rule: Literal["suffix", "tgi"] = Field(
        "suffix",
        description="Drafts continue the latest of the longest earlier matches of the last 2 to 4 tokens (suffix); or,"
        " as in TGI, the first occurrence of the last token (tgi).",
    )
    dtype: Dtype | None = Field(
        None,
        description="Compute type. Unset: on a GPU the model's; on a CPU bfloat16 if native, otherwise float32.",
    )
    kv_cache_dtype: Annotated[
        KVCacheDtype | None, Tunable(choices=("auto", "fp8_e4m3fn"), when="quantize in ['none', 'fp8']")
    ] = Field(
        None,
        description="Data type of the K/V cache; e4m3 with the scales of the checkpoint. Unset: the compute type.",
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: seeded random weights, no download.")
    attention: Attention = Field(
        "auto", description="Attention backend, or one of TGI's names, which sets the block size."
    )
    prefill_chunking: Annotated[bool, FieldSource(takes_value=True, digits=True), Tunable(central=True)] = Field(
        True,
        description="Prefill in chunks that share steps with decode. If true, the waiting settings have no effect.",
    )
    prefix_caching: Annotated[bool | None, FieldSource(takes_value=True, digits=True)] = Field(
        None, description="Reuse the K/V of shared prompt prefixes. Unset: on if model and backend support it."
    )
    run_ahead: Annotated[bool | None, TrueOrFalse] = Field(
        None, description="Compute one decode step ahead. Unset: on if the model server supports it."
    )
    compiled_walk: Annotated[bool, FieldSource(takes_value=True, digits=True)] = Field(
        True, description="On a CPU, compute a decode step with one operator where the model allows it."
    )
    cuda_graphs: Annotated[Integers | None, Tunable(choices=("0", "1,2,4,8,16,32"))] = Field(
        None, description="Batch sizes to capture as CUDA graphs; 0 captures none. Unset: the model server's list."
    )
    cuda_memory_fraction: Annotated[float, Tunable(0.5, 1.0, step=0.01, central=True)] = Field(
        1.0, gt=0, le=1, description="Fraction of the device's memory to use; on a CPU, of --cpu-memory-gib."
    )
    cpu_memory_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Device memory on a CPU, in GiB. Unset: the smaller of 4 and half of the free memory.",
    )
    compute_threads: Annotated[Positive | None, FieldSource(env=("COMPUTE_THREADS", "OMP_NUM_THREADS"))] = Field(
        None, description="Threads of a shard on a CPU. Unset: all cores but one, divided by the shards."
    )
    wiggle_room: Annotated[float | None, FieldSource(flag=False, env=("TGI_WIGGLE_ROOM",))] = Field(
        None,
        gt=0,
        lt=1,
        description="Fraction of --cuda-memory-fraction for the KV cache. Unset: 0.95 in plans, 0.90 in use.",
    )
    rope_scaling: Literal["linear", "dynamic"] | None = Field(None, description="Kind of RoPE scaling.")
    rope_factor: float | None = Field(None, gt=0, allow_inf_nan=False, description="Factor of RoPE scaling.")
    watermark_gamma: float = Field(
        0.5, gt=0, lt=1, description="Fraction of the vocabulary on the watermark's green list."
    )
    watermark_delta: float = Field(2.0, allow_inf_nan=False, description="Watermark logit bias.")
    enable_prefill_logprobs: Annotated[
        bool, FieldSource(env=("ENABLE_PREFILL_LOGPROBS", "REQUEST_LOGPROBS"), digits=True)
    ] = Field(False, description="Allow requests for prompt logprobs; costs memory.")
    disable_custom_kernels: bool = Field(False, description="Run the model's modules without fusing them.")

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.dtype is not None and self.quantize is not None and self.quantize not in BITSANDBYTES:
            raise ValueError(f"`dtype` is {self.dtype}, but `quantize` {self.quantize} sets its own: leave one out")
        if self.attention == "paged" and self.prefix_caching:
            raise ValueError("`prefix_caching` does not work with `attention` paged: leave one out")
        return self


class BatchingConfig(CommonConfig):
    """Batching"""

    max_concurrent_requests: Annotated[int, Tunable(1, 1024, log=True)] = Field(
        128, gt=0, description="Largest number of requests in the router; others get 429."
    )
    waiting_served_ratio: Annotated[float | None, Tunable(0.05, 3.0, log=True, when="not prefill_chunking")] = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Ratio of queued to running requests at which queued ones join the batch.",
    )
    max_batch_prefill_tokens: Annotated[int | None, Tunable(512, 32_768, log=True, multiple_of=64, central=True)] = (
        Field(
            None,
            gt=0,
            description="Largest number of prompt tokens in one prefill. Unset in the launcher: the tokens that the"
            " GPU computes in a second, otherwise 4096; at most the model's positions and what fits in memory.",
        )
    )
    max_batch_total_tokens: Annotated[int | None, Tunable(1024, 1_048_576, log=True, multiple_of=64)] = Field(
        None, gt=0, description="Largest number of tokens in a batch. For padded models; others report their own."
    )
    max_waiting_tokens: Annotated[int, Tunable(1, 100, log=True, when="not prefill_chunking", central=True)] = Field(
        20, ge=0, description="Decode steps after which queued requests join the batch."
    )
    max_best_of: NonNegative = Field(2, description="Largest best_of.")
    max_stop_sequences: NonNegative = Field(4, description="Largest number of stop strings.")
    max_top_n_tokens: NonNegative = Field(5, description="Largest top_n_tokens.")
    max_client_batch_size: NonNegative = Field(4, description="Largest number of prompts in a completion call.")
    max_requests_per_client: Positive | None = Field(
        None,
        description="Largest number of requests of one client (the API key, else an address); others get 429.",
    )
    max_queue_time: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Longest time in the queue, in seconds; a request that waited longer gets 429. Unset: no limit.",
    )
    grpc_schema: Literal["v3", "v2"] = Field("v3", description="Version of the gRPC schema of the model server.")
    step_timeout: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Longest duration of a model step, in seconds. Unset: 120 on an accelerator, 600 on a CPU.",
    )
    step_trace: Path | None = Field(None, description="File to write one row per model step to.")
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


class HttpConfig(CommonConfig):
    """HTTP, tokenizer and clients"""

    hostname: str = Field(
        "0.0.0.0", description="Address or host name to listen on; the machine's own name is every interface."
    )
    port: Annotated[Port, FieldSource(short="p")] = Field(3000, description="HTTP port.")
    prometheus_port: Port | None = Field(None, description="Additional port that serves /metrics only.")
    api_key: Annotated[Secret | None, FieldSource()] = Field(None, description="Bearer key that clients must send.")
    api_key_file: Path | None = Field(
        None, description="File of bearer keys, one on each line; each is valid, as is --api-key."
    )
    adapter_fallback: bool = Field(
        False,
        description="Serve a request that names an unknown adapter with the base model, as TGI does; do not refuse it."
        " Without adapters every name selects the model.",
    )
    auth_all_routes: bool = Field(False, description="Require the key on all routes except /health, /ping and /ready.")
    cors_allow_origin: Annotated[Strings, FieldSource(repeated=True)] = Field(
        (), description="Allowed CORS origin; repeat for several. Unset: any."
    )
    shutdown_delay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after SIGTERM in which requests are still accepted while /ready is 503.",
    )
    payload_limit: NonNegative = Field(2_000_000, description="Largest request body, in bytes.")
    tokenizer_name: str | None = Field(
        None,
        min_length=1,
        description="Tokenizer: hub repository, directory or preset. Unset: the model's.",
    )
    tokenizer_config_path: Path | None = Field(None, description="Local tokenizer_config.json (chat template).")
    validation_workers: int = Field(2, description="Tokenizer threads in the router.")
    disable_grammar_support: bool = Field(False, description="Refuse requests with a grammar.")
    allow_image_fetch: bool = Field(
        False, description="Fetch images that requests name by URL, from public addresses on ports 80 and 443."
    )
    max_image_fetch_size: NonNegative = Field(33_554_432, description="Largest fetched image, in bytes.")
    image_fetch_hosts: Words = Field((), description="The only hosts from which images are fetched. Unset: any public.")
    plain_text_decode_errors: bool = Field(
        False, description="Answer a body that cannot be decoded in plain text, as TGI does."
    )
    usage_stats: Literal["on", "off", "no-stack"] = Field(
        "on", description="Accepted for compatibility with TGI; no statistics are sent."
    )
    vertex: bool = Field(False, description="Serve the routes that Vertex AI sets in AIP_* variables.")
    aip_http_port: Annotated[Port | None, FieldSource(flag=False)] = Field(
        None, description="With --vertex: the port, instead of --port."
    )
    aip_predict_route: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, pattern=r"^/[^{}]*$", description="With --vertex: the path of /vertex."
    )
    aip_health_route: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, pattern=r"^/[^{}]*$", description="With --vertex: the path of /health."
    )
    kserve: bool = Field(False, description="Serve the KServe v2 routes.")
    ngrok: bool = Field(False, description="Open an ngrok tunnel.")
    ngrok_authtoken: Secret | None = Field(None, description="Token of the ngrok tunnel.")
    ngrok_edge: str | None = Field(None, description="Edge of the ngrok tunnel.")
    compute_type: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, description="Text of the x-compute-type response header. Unset: shards and GPU name."
    )
    docker_label: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, description="Label of the image, in /info and in system_fingerprint."
    )
    tuned_by: str | None = Field(
        None, description="Study and trial that chose this configuration: STUDY/TRIAL or STUDY/TRIAL/confirmed."
    )
    launch_settings: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, description="JSON from the launcher for /config: value, source and reason of each field."
    )

    @model_validator(mode="after")
    def _check_http(self) -> Self:
        if self.validation_workers <= 0:
            raise ValueError("`validation_workers` must be > 0")
        if self.ngrok and (self.ngrok_authtoken is None or self.ngrok_edge is None):
            raise ValueError("`ngrok` needs `ngrok_authtoken` and `ngrok_edge`")
        return self


class ProcessConfig(CommonConfig):
    """Processes of the launcher"""

    sharded: Annotated[bool | None, TrueOrFalse] = Field(
        None,
        description="true: --num-shard shards, or one for each visible device, at least 2. false: --num-shard shards,"
        " or one. Unset: --num-shard shards, or one for each device in CUDA_VISIBLE_DEVICES and the like, or one.",
    )
    num_shard: Annotated[int | None, Tunable(1, 8)] = Field(
        None, ge=0, description="Number of shards; also with --sharded false."
    )
    max_input_length: Positive | None = Field(None, description="Old name of --max-input-tokens.")
    shard_uds_path: str | None = Field(
        None, min_length=1, description="Socket prefix; -RANK is added. Unset: in a private directory."
    )
    master_addr: str | None = Field(
        None, min_length=1, description="Rendezvous host of the shards over TCP. Unset: a file in the socket directory."
    )
    master_port: Port = Field(29500, description="Rendezvous port.")
    num_nodes: Positive = Field(
        1, description="Number of hosts that share one model, with --num-shard shards on each, at --shard-addr."
    )
    node_rank: NonNegative = Field(0, description="Index of this host; host 0 runs the router.")
    no_shards: bool = Field(False, description="Start only the router, for the model servers of --shard-addr.")
    env: Annotated[bool, FieldSource(short="e", env=())] = Field(False, description="Log the environment at the start.")
    graceful_termination_timeout: Annotated[NonNegative, FieldSource(short="g")] = Field(
        90, description="Seconds between SIGTERM and SIGKILL of a child process."
    )

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.max_input_tokens is not None and self.max_input_length is not None:
            raise ValueError("`max_input_tokens` and `max_input_length` are the same setting: give one")
        length, total = self.max_input_length, self.max_total_tokens
        if length is not None and total is not None and length >= total:
            raise ValueError("`max_input_tokens` must be < `max_total_tokens`")
        if self.num_shard == 0:
            raise ValueError("`num_shard` is 0, but must be at least 1")
        if self.sharded and self.num_shard is not None and self.num_shard <= 1:
            raise ValueError(f"`sharded` is true but `num_shard` is {self.num_shard}")
        if self.num_nodes > 1:
            if self.no_shards or not self.shard_addr or self.master_addr is None:
                raise ValueError(
                    "`num_nodes` needs `master_addr`, and `shard_addr` with every node's shards in rank order"
                )
        elif self.no_shards != bool(self.shard_addr):
            raise ValueError("`no_shards` and `shard_addr` only work together")
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"`node_rank` is {self.node_rank} but `num_nodes` is {self.num_nodes}")
        return self


class ServerConfig(ModelConfig, BatchingConfig, HttpConfig, ProcessConfig):
    """All settings of the launcher."""

    command: ClassVar[Command] = "launcher"

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.quantize == "exl2" and (self.num_shard or 1) > 1:
            raise ValueError(
                f"`quantize` exl2 cannot be sharded, but `num_shard` is {self.num_shard}: "
                "set it to 1, or use a GPTQ or AWQ checkpoint"
            )
        prompt = self.max_input_tokens or self.max_input_length
        budget = self.max_batch_prefill_tokens
        if not self.prefill_chunking and prompt is not None and budget is not None and budget < prompt:
            raise ValueError(
                "`max_batch_prefill_tokens` must be >= `max_input_tokens` without `prefill_chunking`."
                f" Given: {budget} and {prompt}"
            )
        return self


class RouterConfig(BatchingConfig, HttpConfig):
    """All settings of the router."""

    command: ClassVar[Command] = "router"

    master_shard_uds_path: str = Field(
        f"{DEFAULT_SOCKET_PREFIX}-0", min_length=1, description="Socket of the first model server."
    )
    shard_attention: Annotated[Attention, FieldSource(flag=False, env=("ATTENTION",))] = Field(
        "auto", description="The model server's --attention, which sets the block size with schema v2."
    )


class ShardConfig(ModelConfig):
    """All settings of `text-generation-server serve`."""

    command: ClassVar[Command] = "serve"

    model_id: PositionalModel
    sharded: Annotated[bool, FieldSource(env=())] = Field(
        False, description="One of several shards: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set."
    )
    uds_path: Annotated[str, FieldSource(env=())] = Field(
        DEFAULT_SOCKET_PREFIX, min_length=1, description="Socket prefix; -RANK is added."
    )
    listen: Annotated[str | None, FieldSource(env=())] = Field(
        None, min_length=1, description="host:port to listen on instead of the socket; the default host is 127.0.0.1."
    )
    logger_level: LoggerLevel = "INFO"

    @model_validator(mode="after")
    def _check_listen(self) -> Self:
        if self.shard_addr and self.listen is None:
            raise ValueError("`shard_addr` needs `listen`")
        return self


class DownloadConfig(HubConfig):
    """All settings of `text-generation-server download-weights`."""

    command: ClassVar[Command] = "download-weights"

    model_id: PositionalModel
    extension: str = Field(".safetensors", min_length=1, description="Extension of the weight files.")
    auto_convert: bool = Field(True, description="Convert .bin and .pt files to safetensors.")
    merge_lora: bool = Field(False, description="Merge an adapter repository into its base model.")
    logger_level: LoggerLevel = "INFO"


class QuantizeConfig(HubConfig):
    """All settings of `text-generation-server quantize`."""

    command: ClassVar[Command] = "quantize"

    model_id: PositionalModel
    output_dir: Annotated[Path, FieldSource(positional=True)] = Field(description="Directory for the quantized model.")
    upload_to_model_id: str | None = Field(None, description="Hub repository to upload the result to.")
    percdamp: float = Field(0.01, gt=0, lt=1, allow_inf_nan=False, description="GPTQ dampening.")
    act_order: bool = Field(False, description="GPTQ activation order.")
    groupsize: int | None = Field(
        None,
        description="GPTQ group size; -1 for one group. Unset: the largest of 128, 64, 32, 16 that divides all inputs.",
    )
    bits: Annotated[int, FieldSource(env=())] = Field(4, description="Bits per weight: 2, 4 or 8.")
    sym: Annotated[bool, FieldSource(env=(), takes_value=True)] = Field(
        True, description="Symmetric quantization: the zero point is the middle of the range."
    )
    static_groups: Annotated[bool, FieldSource(env=())] = Field(
        False, description="With --act-order, keep groups of neighbouring inputs."
    )
    calibration_file: Annotated[Path | None, FieldSource(env=())] = Field(
        None, description="Calibration text. Unset: WikiText-2 from the hub; for a preset, the text in the package."
    )
    nsamples: Annotated[Positive, FieldSource(env=())] = Field(
        128, description="Number of windows of the calibration text."
    )
    seqlen: Annotated[Positive | None, FieldSource(env=())] = Field(
        None, description="Tokens per window. Unset: the smaller of 2048 and the model's positions."
    )
    seed: Annotated[int, FieldSource(env=())] = Field(0, description="Seed that draws the windows.")
    logger_level: LoggerLevel = "INFO"

    @model_validator(mode="after")
    def _check_rounding(self) -> Self:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"`bits` is {self.bits}, but must be 2, 4 or 8")
        if self.groupsize is not None and self.groupsize != -1 and self.groupsize < 1:
            raise ValueError(f"`groupsize` is {self.groupsize}: give a number of inputs, or -1 for one group")
        if self.static_groups and not self.act_order:
            raise ValueError("`static_groups` has no effect without `act_order`: add it, or leave both out")
        return self


class RankConfig(BaseModel):
    """The rank of this process in its group. Read from RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    The rendezvous is `rendezvous_file` (RENDEZVOUS_FILE), or else TCP at the master's address.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: NonNegative = 0
    world_size: Positive = 1
    master_addr: str = "localhost"
    master_port: Port = 29500
    rendezvous_file: Path | None = None

    @model_validator(mode="after")
    def _check_rank(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"RANK is {self.rank} but WORLD_SIZE is {self.world_size}")
        return self
