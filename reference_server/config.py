"""Every setting of the launcher, the router and the model server, declared once.

A field is a flag (`--max-total-tokens`), a variable (`MAX_TOTAL_TOKENS`), a TOML key (`max_total_tokens`) and a row of
docs/settings.md. Reading those sources is `settings.py`; this module imports pydantic alone and reads nothing.

    HubConfig ── CommonConfig ─┬─ ModelConfig ─────┬──────── ShardConfig       text-generation-server serve
       │                       ├─ BatchingConfig ──┼──┬───── RouterConfig      text-generation-router
       │                       ├─ HttpConfig ──────┼──┘
       │                       └─ ProcessConfig ───┴──────── ServerConfig      text-generation-launcher
       ├─ DownloadConfig                                        text-generation-server download-weights
       └─ QuantizeConfig                                                text-generation-server quantize

A default that depends on the command is `None` here and stands in `COMMAND_DEFAULTS`; one that depends on model or
device is resolved in `launcher/plan.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reference_server.config_fields import (
    Integers,
    NonNegative,
    Port,
    Positive,
    Source,
    Strings,
    TrueOrFalse,
    Words,
    argv_of,
    environ_of,
)
from reference_server.config_fields import Secret as Secret
from reference_server.config_fields import Tunable as Tunable
from reference_server.config_fields import tunables as tunables

Quantize = Literal[
    "awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "bitsandbytes-nf4",
    "bitsandbytes-fp4", "fp8",
]  # fmt: skip
Dtype = Literal["float16", "bfloat16", "float32"]
KVCacheDtype = Literal["fp8_e4m3fn", "fp8_e5m2"]
Attention = Literal[
    "auto", "torch", "varlen", "triton", "flash", "paged", "flashdecoding", "flashdecoding-ipex", "flashinfer"
]  # fmt: skip

BITSANDBYTES = ("bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4")
DEFAULT_SOCKET_PREFIX = "/tmp/text-generation-server"

Command = Literal["launcher", "router", "serve", "download-weights", "quantize"]

# Defaults that differ by command. What is missing here stays `None` and means "computed" or "none".
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
# What the v2 schema's router takes for lengths that v3 leaves to warm-up.
SCHEMA_V2_DEFAULTS: Mapping[str, object] = {"max_input_tokens": 1024, "max_total_tokens": 2048}


PositionalModel = Annotated[
    str,
    Source(positional=True),
    Field(pattern=r"^[^-]", description="Hub repository, local directory, or a built-in `preset:NAME`."),
]
LoggerLevel = Annotated[str, Source(env=()), Field(description="Log level.")]

Part = TypeVar("Part", bound=BaseModel)


class HubConfig(BaseModel):
    """Hub and logs"""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    command: ClassVar[Command]

    config_file: Path | None = Field(None, description="TOML file of settings; below environment and flags.")
    revision: str | None = Field(None, description="Branch, tag, PR ref or commit of the hub repository.")
    trust_remote_code: bool = Field(False, description="Allow code that comes with the model, and pickle conversion.")
    huggingface_hub_cache: Path | None = Field(None, description="Hub cache directory.")
    weights_cache_override: Path | None = Field(None, description="Directory of weight files, used before the cache.")
    hub_token: Annotated[
        Secret | None, Source(flag=False, env=("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    ] = Field(None, description="Token of the model hub; children get it as HF_TOKEN.")
    json_output: bool = Field(False, description="Log JSON lines instead of text.")
    log_level: Annotated[str, Source(flag=False)] = Field("info", description="Log level or filter.")

    def to_argv(self) -> list[str]:
        """The command line that reads as this configuration; never a secret, see `to_environ`."""
        return argv_of(self)

    def to_environ(self) -> dict[str, str]:
        """The variables that complete `to_argv`: secrets and the settings without a flag."""
        return environ_of(self)

    def part(self, part: type[Part], **changes: object) -> Part:
        """The settings that another command takes, with `changes`."""
        shared = {name: getattr(self, name) for name in part.model_fields if name in type(self).model_fields}
        return part.model_validate(shared | changes)


class CommonConfig(HubConfig):
    """Shared by router and model server"""

    max_input_tokens: Positive | None = Field(None, description="Longest accepted prompt. Unset: found by warm-up.")
    max_total_tokens: Positive | None = Field(
        None, description="Prompt plus new tokens of one request. Unset: found by warm-up."
    )
    max_batch_size: Annotated[int | None, Tunable(1, 512, log=True)] = Field(
        None, description="Most requests in one batch."
    )
    lora_adapters: Words = Field((), description="Adapters: id, id@revision, id=path or id=path@revision.")
    shard_addr: Words = Field((), description="Model servers over TCP, host:port in rank order.")
    otlp_endpoint: str | None = Field(None, description="Trace collector.")
    otlp_service_name: str | None = Field(None, description="Service name in traces.")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.max_batch_size == 0:
            raise ValueError("`max_batch_size` must be > 0")
        if self.max_input_tokens and self.max_total_tokens and self.max_input_tokens >= self.max_total_tokens:
            raise ValueError("`max_input_tokens` must be < `max_total_tokens`")
        return self


class ModelConfig(CommonConfig):
    """Model, memory and kernels"""

    model_id: Annotated[str | None, Source()] = Field(
        None, min_length=1, description="Hub repository, local directory, or a built-in `preset:NAME`."
    )
    quantize: Annotated[Quantize | None, Tunable(choices=("none", "eetq", "fp8", *BITSANDBYTES), central=True)] = Field(
        None, description="Weight quantization; not needed for quantized checkpoints."
    )
    speculate: Annotated[int | None, Tunable(0, 8)] = Field(
        None, ge=0, description="Ids to speculate: Medusa or MLP heads of the checkpoint, else n-gram lookup."
    )
    dtype: Dtype | None = Field(
        None, description="Compute type. Unset: the model's own on a GPU; bfloat16 where a CPU has it, else float32."
    )
    kv_cache_dtype: Annotated[
        KVCacheDtype | None, Tunable(choices=("auto", "fp8_e4m3fn"), when="quantize in ['none', 'fp8']")
    ] = Field(None, description="Type of the KV cache. Unset: the compute type.")
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: seeded random weights, no download.")
    attention: Attention = Field(
        "auto", description="Attention backend: ours by name, or a name of TGI's, which fixes the page size."
    )
    prefill_chunking: Annotated[bool, Source(takes_value=True, digits=True), Tunable(central=True)] = Field(
        True, description="Prefill in chunks that share steps with decode. While on, waiting settings have no effect."
    )
    prefix_caching: Annotated[bool | None, Source(takes_value=True, digits=True)] = Field(
        None, description="Reuse the K/V of shared prompt prefixes. Unset: on where model and backend can."
    )
    run_ahead: Annotated[bool | None, TrueOrFalse] = Field(
        None, description="Let a shard compute one step ahead. Unset: on where the model server can."
    )
    cuda_graphs: Annotated[Integers | None, Tunable(choices=("0", "1,2,4,8,16,32"))] = Field(
        None, description="Batch sizes to capture as CUDA graphs; 0 captures none. Unset: the shard's list."
    )
    cuda_memory_fraction: Annotated[float, Tunable(0.5, 1.0, step=0.01, central=True)] = Field(
        1.0, gt=0, le=1, description="Share of the device's memory to use; on a CPU, of --cpu-memory-gib."
    )
    cpu_memory_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Memory that counts as the device's on a CPU. Unset: the smaller of 4 and half of what is free.",
    )
    compute_threads: Annotated[Positive | None, Source(env=("COMPUTE_THREADS", "OMP_NUM_THREADS"))] = Field(
        None, description="Threads of a shard on a CPU. Unset: the cores less one, shared among the shards."
    )
    wiggle_room: Annotated[float | None, Source(flag=False, env=("TGI_WIGGLE_ROOM",))] = Field(
        None, gt=0, lt=1, description="Share of the fraction that the cache may take. Unset: 0.95 planned, 0.90 used."
    )
    rope_scaling: Literal["linear", "dynamic"] | None = Field(None, description="RoPE scaling kind.")
    rope_factor: float | None = Field(None, gt=0, allow_inf_nan=False, description="RoPE scaling factor.")
    watermark_gamma: float = Field(
        0.5, gt=0, lt=1, description="Share of the vocabulary on the watermark's green list."
    )
    watermark_delta: float = Field(2.0, allow_inf_nan=False, description="Watermark logit bias.")
    enable_prefill_logprobs: Annotated[
        bool, Source(env=("ENABLE_PREFILL_LOGPROBS", "REQUEST_LOGPROBS"), digits=True)
    ] = Field(False, description="Let clients ask for prompt logprobs; costs memory.")
    disable_custom_kernels: bool = Field(False, description="Run the model's own modules, without our fused ones.")

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.dtype is not None and self.quantize is not None and self.quantize not in BITSANDBYTES:
            raise ValueError(f"`dtype` is {self.dtype}, but `quantize` {self.quantize} chooses its own: leave one out")
        if self.attention == "paged" and self.prefix_caching:
            raise ValueError("`prefix_caching` is not possible with `attention` paged: leave one out")
        return self


class BatchingConfig(CommonConfig):
    """Batching"""

    max_concurrent_requests: Annotated[int, Tunable(1, 1024, log=True)] = Field(
        128, gt=0, description="Requests in the router at once; more get 429."
    )
    waiting_served_ratio: Annotated[float | None, Tunable(0.05, 3.0, log=True, when="not prefill_chunking")] = Field(
        None, ge=0, allow_inf_nan=False, description="Queued requests per running one that make them join."
    )
    max_batch_prefill_tokens: Annotated[int | None, Tunable(512, 32_768, log=True, multiple_of=64, central=True)] = (
        Field(
            None,
            gt=0,
            description="Most prompt tokens computed in one prefill. Unset in the launcher: the tokens the"
            " GPU computes in a second, else 4096, at most the model's positions and what fits in memory.",
        )
    )
    max_batch_total_tokens: Annotated[int | None, Tunable(1024, 1_048_576, log=True, multiple_of=64)] = Field(
        None, gt=0, description="Token budget of a batch. Used for padded models; others report their own."
    )
    max_waiting_tokens: Annotated[int, Tunable(1, 100, log=True, when="not prefill_chunking", central=True)] = Field(
        20, ge=0, description="Decode steps before waiting requests join."
    )
    max_best_of: NonNegative = Field(2, description="Upper bound of best_of.")
    max_stop_sequences: NonNegative = Field(4, description="Upper bound of the number of stop strings.")
    max_top_n_tokens: NonNegative = Field(5, description="Upper bound of top_n_tokens.")
    max_client_batch_size: NonNegative = Field(4, description="Prompts in one completion call.")
    max_requests_per_client: Positive | None = Field(None, description="Requests one client may hold; more get 429.")
    grpc_schema: Literal["v3", "v2"] = Field("v3", description="Wire schema spoken to the model server.")
    step_timeout: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds one model step may take. Unset: 120 on an accelerator, 600 on a CPU.",
    )
    step_trace: Path | None = Field(None, description="File that gets one row per model step.")
    check_invariants: bool = Field(False, description="Check the scheduler's invariants after every step.")

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
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

    hostname: str = Field("0.0.0.0", description="Address to listen on.")
    port: Annotated[Port, Source(short="p")] = Field(3000, description="HTTP port.")
    prometheus_port: Port | None = Field(None, description="Port of a listener for metrics alone; only when given.")
    api_key: Annotated[Secret | None, Source()] = Field(None, description="Bearer key that clients must send.")
    auth_all_routes: bool = Field(False, description="Ask for the key on every route but /health and /ping.")
    cors_allow_origin: Annotated[Strings, Source(repeated=True)] = Field(
        (), description="Allowed CORS origin, once for each. None given: any."
    )
    payload_limit: NonNegative = Field(2_000_000, description="Bytes of the largest request body.")
    tokenizer_name: str | None = Field(
        None,
        min_length=1,
        description="Tokenizer: hub repository, directory or preset. Unset: the model's.",
    )
    tokenizer_config_path: Path | None = Field(None, description="Local tokenizer_config.json (chat template).")
    validation_workers: int = Field(2, description="Tokenizer threads in the router.")
    disable_grammar_support: bool = Field(False, description="Refuse requests with a grammar.")
    allow_image_fetch: bool = Field(False, description="Fetch images that requests name by URL.")
    max_image_fetch_size: NonNegative = Field(33_554_432, description="Bytes of the largest fetched image.")
    plain_text_decode_errors: bool = Field(False, description="Answer undecodable bodies in plain text, as TGI does.")
    usage_stats: Literal["on", "off", "no-stack"] = Field(
        "on", description="Accepted for TGI's sake; nothing is ever sent."
    )
    vertex: bool = Field(False, description="Serve the routes that Vertex AI names in AIP_*.")
    aip_http_port: Annotated[Port | None, Source(flag=False)] = Field(
        None, description="With --vertex: the port, instead of --port."
    )
    aip_predict_route: Annotated[str | None, Source(flag=False)] = Field(
        None, pattern=r"^/[^{}]*$", description="With --vertex: another path of /vertex."
    )
    aip_health_route: Annotated[str | None, Source(flag=False)] = Field(
        None, pattern=r"^/[^{}]*$", description="With --vertex: another path of /health."
    )
    kserve: bool = Field(False, description="Serve the KServe v2 routes.")
    ngrok: bool = Field(False, description="Open an ngrok tunnel.")
    ngrok_authtoken: Secret | None = Field(None, description="Token of the ngrok tunnel.")
    ngrok_edge: str | None = Field(None, description="Edge of the ngrok tunnel.")
    compute_type: Annotated[str | None, Source(flag=False)] = Field(
        None, description="Text of the x-compute-type response header. Unset: shards and GPU name."
    )
    docker_label: Annotated[str | None, Source(flag=False)] = Field(
        None, description="Label of the image, told by /info and in the fingerprint of answers."
    )
    tuned_by: str | None = Field(
        None, description="Study and trial a configuration comes from, as STUDY/TRIAL or STUDY/TRIAL/confirmed."
    )
    launch_settings: Annotated[str | None, Source(flag=False)] = Field(
        None, description="JSON that the launcher hands its router for /config: value, source and reason by field."
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
        description="true: as many shards as --num-shard, else as devices are visible, at least 2. false: --num-shard,"
        " else one. Unset: --num-shard, else as many as devices are visible, one where no variable says.",
    )
    num_shard: Annotated[int | None, Tunable(1, 8)] = Field(
        None, ge=0, description="Number of shards; --sharded false does not switch it off."
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
        1, description="Hosts that share one model: --num-shard shards on each, listening at --shard-addr."
    )
    node_rank: NonNegative = Field(0, description="This host among --num-nodes; the first one has the router.")
    no_shards: bool = Field(False, description="Start the router alone, for the model servers of --shard-addr.")
    env: Annotated[bool, Source(short="e", env=())] = Field(False, description="Log the environment, then start.")
    graceful_termination_timeout: Annotated[NonNegative, Source(short="g")] = Field(
        90, description="Seconds a child has between SIGTERM and SIGKILL."
    )

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.max_input_tokens is not None and self.max_input_length is not None:
            raise ValueError("`max_input_tokens` and `max_input_length` are the same setting: give one")
        length, total = self.max_input_length, self.max_total_tokens
        if length is not None and total is not None and length >= total:
            raise ValueError("`max_input_tokens` must be < `max_total_tokens`")
        if self.num_shard == 0:
            raise ValueError("`num_shard` is 0 but one shard is the least")
        if self.sharded and self.num_shard is not None and self.num_shard <= 1:
            raise ValueError(f"`sharded` is true but `num_shard` is {self.num_shard}")
        if self.num_nodes > 1:
            if self.no_shards or not self.shard_addr or self.master_addr is None:
                raise ValueError(
                    "`num_nodes` needs `master_addr`, and `shard_addr` with every node's shards in rank order"
                )
        elif self.no_shards != bool(self.shard_addr):
            raise ValueError("`no_shards` and `shard_addr` need each other")
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"`node_rank` is {self.node_rank} but `num_nodes` is {self.num_nodes}")
        return self


class ServerConfig(ModelConfig, BatchingConfig, HttpConfig, ProcessConfig):
    """A whole deployment: what the launcher takes."""

    command: ClassVar[Command] = "launcher"

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.quantize == "exl2" and (self.num_shard or 1) > 1:
            raise ValueError(
                f"`quantize` exl2 cannot be sharded, but `num_shard` is {self.num_shard}: "
                "give 1, or take a GPTQ or AWQ checkpoint"
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
    """What the router takes."""

    command: ClassVar[Command] = "router"

    master_shard_uds_path: str = Field(
        f"{DEFAULT_SOCKET_PREFIX}-0", min_length=1, description="Socket of the first model server."
    )
    shard_attention: Annotated[Attention, Source(flag=False, env=("ATTENTION",))] = Field(
        "auto", description="The model server's --attention: schema v2 does not tell its page size, so this does."
    )


class ShardConfig(ModelConfig):
    """What `text-generation-server serve` takes."""

    command: ClassVar[Command] = "serve"

    model_id: PositionalModel
    sharded: Annotated[bool, Source(env=())] = Field(
        False, description="One of several: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set."
    )
    uds_path: Annotated[str, Source(env=())] = Field(
        DEFAULT_SOCKET_PREFIX, min_length=1, description="Socket prefix; -RANK is added."
    )
    listen: Annotated[str | None, Source(env=())] = Field(
        None, min_length=1, description="host:port to listen on instead of the socket; a missing host is 127.0.0.1."
    )
    logger_level: LoggerLevel = "INFO"

    @model_validator(mode="after")
    def _check_listen(self) -> Self:
        if self.shard_addr and self.listen is None:
            raise ValueError("`shard_addr` needs `listen`")
        return self


class DownloadConfig(HubConfig):
    """What `text-generation-server download-weights` takes."""

    command: ClassVar[Command] = "download-weights"

    model_id: PositionalModel
    extension: str = Field(".safetensors", min_length=1, description="Ending of the weight files.")
    auto_convert: bool = Field(True, description="Convert .bin and .pt files to safetensors.")
    merge_lora: bool = Field(False, description="Merge an adapter repository into its base model.")
    logger_level: LoggerLevel = "INFO"


class QuantizeConfig(HubConfig):
    """What `text-generation-server quantize` takes."""

    command: ClassVar[Command] = "quantize"

    model_id: PositionalModel
    output_dir: Annotated[Path, Source(positional=True)] = Field(description="Where the quantized model goes.")
    upload_to_model_id: str | None = Field(None, description="Hub repository to upload the result to.")
    percdamp: float = Field(0.01, gt=0, lt=1, allow_inf_nan=False, description="GPTQ dampening.")
    act_order: bool = Field(False, description="GPTQ activation order.")
    groupsize: int | None = Field(
        None, description="GPTQ group size; -1 for one group. Unset: 128, or 64, 32, 16 where that divides all inputs."
    )
    bits: Annotated[int, Source(env=())] = Field(4, description="Bits of a weight: 2, 4 or 8.")
    sym: Annotated[bool, Source(env=(), takes_value=True)] = Field(
        True, description="Zeros in the middle of the range."
    )
    static_groups: Annotated[bool, Source(env=())] = Field(
        False, description="With the activation order, groups of neighbours all the same."
    )
    calibration_file: Annotated[Path | None, Source(env=())] = Field(
        None, description="Text to calibrate on. Unset: WikiText-2 from the hub; for a preset, its own text."
    )
    nsamples: Annotated[Positive, Source(env=())] = Field(128, description="Windows of the text to calibrate on.")
    seqlen: Annotated[Positive | None, Source(env=())] = Field(
        None, description="Tokens of a window. Unset: 2048, or the model's positions where they are fewer."
    )
    seed: Annotated[int, Source(env=())] = Field(0, description="Draws the windows.")
    logger_level: LoggerLevel = "INFO"

    @model_validator(mode="after")
    def _check_rounding(self) -> Self:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"`bits` is {self.bits}, and GPTQ weights are written with 2, 4 or 8")
        if self.groupsize is not None and self.groupsize != -1 and self.groupsize < 1:
            raise ValueError(f"`groupsize` is {self.groupsize}: give a number of inputs, or -1 for one group")
        if self.static_groups and not self.act_order:
            raise ValueError("`static_groups` says nothing without `act_order`: groups are of neighbours anyway")
        return self


class RankConfig(BaseModel):
    """Which shard of the group this process is. Read from RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    With `rendezvous_file` (RENDEZVOUS_FILE) the group meets at that file, else by TCP at the master's address.
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
