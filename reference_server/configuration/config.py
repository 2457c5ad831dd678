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

A default that depends on the command is `None` here; `COMMAND_DEFAULTS` has its values. `launcher/plan.py` resolves
defaults that depend on the model or the device.
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
# Length limits with wire schema v2. With v3 the warm-up measures them.
SCHEMA_V2_DEFAULTS: Mapping[str, object] = {"max_input_tokens": 1024, "max_total_tokens": 2048}


PositionalModel = Annotated[
    str,
    FieldSource(positional=True),
    Field(pattern=r"^[^-]", description="Model: hub repository, local directory, or a built-in `preset:NAME`."),
]
LoggerLevel = Annotated[str, FieldSource(env=()), Field(description="Lowest level to log.")]

Part = TypeVar("Part", bound=BaseModel)


class HubConfig(BaseModel):
    """Hub and logs"""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    command: ClassVar[Command]
    # Command lines at the end of `--help`.
    examples: ClassVar[tuple[str, ...]] = ()

    config_file: Path | None = Field(None, description="TOML file of settings. Variables and flags override its keys.")
    revision: str | None = Field(
        None,
        description="Branch, tag, pull request ref or commit of the hub repository. Unset: the repository's main "
        "branch.",
    )
    trust_remote_code: bool = Field(
        False,
        description="Run Python code from the model's repository, and convert pickled weights, which can also run "
        "code. Set it only for a repository that you trust.",
    )
    huggingface_hub_cache: Path | None = Field(
        None,
        description="Cache directory of downloaded models. Unset: the hub client's default, which HF_HOME changes.",
    )
    weights_cache_override: Path | None = Field(
        None, description="Directory of weight files to read instead of the cache."
    )
    hub_token: Annotated[
        Secret | None, FieldSource(flag=False, env=("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    ] = Field(
        None,
        description="Access token of the model hub, for private and gated models. The launcher passes it to its "
        "processes as HF_TOKEN.",
    )
    json_output: bool = Field(False, description="Write log lines as JSON instead of text.")
    log_level: Annotated[str, FieldSource(flag=False)] = Field(
        "info",
        description="Lowest level to log, such as debug, info, warn or error; or a level for each module, such as "
        "warn,reference_server.router=debug.",
    )

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
        None,
        description="Longest accepted prompt, in tokens; longer prompts are refused. Lower it to keep long prompts "
        "out. Unset: as long as the warm-up finds possible.",
    )
    max_total_tokens: Positive | None = Field(
        None,
        description="Largest sum of prompt tokens and generated tokens of one request; requests for more are refused. "
        "Each request reserves memory for its sum. Unset: as large as the warm-up finds possible.",
    )
    max_batch_size: Annotated[int | None, Tunable(1, 512, log=True)] = Field(
        None,
        description="Largest number of requests in a batch. Lower it to bound the time of a decode step. With "
        "--prefill-chunking it limits the first batch only. Unset: memory is the only limit.",
    )
    lora_adapters: Words = Field(
        (),
        description="LoRA adapters to load at start: id, id@revision, name=path, name=id, name=id@revision or "
        "preset:NAME. A request selects one by its name.",
    )
    adapter_directory: Path | None = Field(
        None,
        description="Directory of adapters that can be loaded and unloaded while the server runs "
        "(/v1/load_lora_adapter, /v1/unload_lora_adapter). Unset: the server refuses these two routes.",
    )
    adapter_memory_mib: Positive = Field(
        256,
        description="Memory of each shard for all adapters together, in MiB, if --adapter-directory is set. The K/V "
        "cache is smaller by this amount.",
    )
    max_adapters: Positive = Field(64, description="Largest number of adapters that are loaded at the same time.")
    shard_addr: Words = Field(
        (),
        description="TCP addresses of the model servers, as host:port in the order of their ranks. Unset: unix sockets "
        "on this host.",
    )
    transport: Annotated[Transport, FieldSource(env=("SHARD_TRANSPORT",))] = Field(
        "auto",
        description="Protocol between the router and the model servers on unix sockets: link (frames on a second "
        "socket, faster) or grpc. auto: link if the model server offers it, otherwise grpc. TCP addresses and "
        "--grpc-schema v2 always use grpc.",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="Address of an OpenTelemetry collector, which receives traces by OTLP over gRPC. Unset: no traces.",
    )
    otlp_service_name: str | None = Field(None, description="Name of this service in its traces.")

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
        None, min_length=1, description="Model to serve: hub repository, local directory, or a built-in `preset:NAME`."
    )
    quantize: Annotated[Quantize | None, Tunable(choices=PLAIN_CHOICES, central=True)] = Field(
        None,
        description="Quantization of the weights when they are loaded; it saves memory. Unset: the weights as they are "
        "stored. A checkpoint that is already quantized needs no flag.",
    )
    speculate: Annotated[int | None, Tunable(0, 8)] = Field(
        None,
        ge=0,
        description="Largest number of draft tokens of a request in one decode step, which verifies them. Drafts come "
        "from the heads of a speculator model, or otherwise from n-gram lookup. 0: no drafts. Unset: all heads of a "
        "speculator, otherwise 0.",
    )
    speculate_adaptive: Annotated[bool, FieldSource(takes_value=True, digits=True)] = Field(
        True,
        description="Draft only if it saves time, by the measured time of a step and the number of accepted draft "
        "tokens of a request. false: every draft has --speculate tokens.",
    )
    ngram_rule: Literal["suffix", "tgi"] = Field(
        "suffix",
        description="Rule for drafts without a speculator. suffix: find earlier occurrences of the last 2 to 4 tokens, "
        "and copy what follows the longest match, the latest one of equal ones. tgi: copy what follows the first "
        "occurrence of the last token.",
    )
    dtype: Dtype | None = Field(
        None,
        description="Data type of the computation. Unset: on a GPU the model's own; on a CPU bfloat16 if the processor "
        "has instructions for it, otherwise float32.",
    )
    kv_cache_dtype: Annotated[
        KVCacheDtype | None, Tunable(choices=("auto", "fp8_e4m3fn"), when="quantize in ['none', 'fp8']")
    ] = Field(
        None,
        description="Data type of the K/V cache. fp8 holds twice the tokens of a 16-bit type in the same memory, with "
        "less precision; fp8_e4m3fn uses the scales of the checkpoint. Unset: the data type of the computation.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="auto: load the model's weights. dummy: use seeded random weights without a download, to measure "
        "speed only.",
    )
    attention: Attention = Field(
        "auto",
        description="Attention backend, or one of TGI's names for it, which also sets the block size. auto: the "
        "fastest that the device and the model support.",
    )
    prefill_chunking: Annotated[bool, FieldSource(takes_value=True, digits=True), Tunable(central=True)] = Field(
        True,
        description="Split long prompts into chunks that are computed in the same steps as decode, so that running "
        "requests do not pause. If true, --waiting-served-ratio and --max-waiting-tokens have no effect.",
    )
    prefix_caching: Annotated[bool | None, FieldSource(takes_value=True, digits=True)] = Field(
        None,
        description="Keep the K/V of prompts, and reuse it for prompts that begin with the same tokens. Unset: true if "
        "the model and the attention backend support it.",
    )
    run_ahead: Annotated[bool | None, TrueOrFalse] = Field(
        None,
        description="Start a decode step before the router has asked for it, so that the shard does not wait. Unset: "
        "true if the model server supports it.",
    )
    compiled_walk: Annotated[bool, FieldSource(takes_value=True, digits=True)] = Field(
        True,
        description="On a CPU, compute a whole decode step with one compiled operator if the model allows it. false: "
        "one operator for each layer and operation, to find out whether it is at fault.",
    )
    cuda_graphs: Annotated[Integers | None, Tunable(choices=("0", "1,2,4,8,16,32"))] = Field(
        None,
        description="Batch sizes for which decode steps are captured as CUDA graphs, which removes launch costs and "
        "takes memory. 0: none. Unset: the model server's own list.",
    )
    cuda_memory_fraction: Annotated[float, Tunable(0.5, 1.0, step=0.01, central=True)] = Field(
        1.0,
        gt=0,
        le=1,
        description="Fraction of the device's memory that the server may use; on a CPU, of --cpu-memory-gib. Lower it "
        "if other programs use the same device.",
    )
    cpu_memory_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Memory for all shards together on a CPU, in GiB. Unset: 4, or half of the free memory if that is "
        "less.",
    )
    compute_threads: Annotated[Positive | None, FieldSource(env=("COMPUTE_THREADS", "OMP_NUM_THREADS"))] = Field(
        None,
        description="Number of threads of a shard on a CPU. Unset: all cores but one, divided by the number of shards.",
    )
    wiggle_room: Annotated[float | None, FieldSource(flag=False, env=("TGI_WIGGLE_ROOM",))] = Field(
        None,
        gt=0,
        lt=1,
        description="Fraction of the memory of --cuda-memory-fraction that weights, activations and K/V cache may fill "
        "on a GPU; the rest is a reserve. Unset: 0.90, and 0.95 where the launcher estimates the prefill that fits.",
    )
    rope_scaling: Literal["linear", "dynamic"] | None = Field(
        None,
        description="Method that extends rotary position embeddings beyond the length that the model was trained with. "
        "Unset: the model's own; linear if --rope-factor is set.",
    )
    rope_factor: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Factor by which --rope-scaling extends that length. Unset: the model's own; 1 if --rope-scaling "
        "is set.",
    )
    watermark_gamma: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="For requests with a watermark: fraction of the vocabulary that the watermark favours.",
    )
    watermark_delta: float = Field(
        2.0,
        allow_inf_nan=False,
        description="For requests with a watermark: value added to the logits of the favoured tokens. A larger value "
        "is easier to detect and changes the text more.",
    )
    enable_prefill_logprobs: Annotated[
        bool, FieldSource(env=("ENABLE_PREFILL_LOGPROBS", "REQUEST_LOGPROBS"), digits=True)
    ] = Field(
        False,
        description="Accept requests for the log probabilities of prompt tokens. They need memory for the logits of a "
        "whole prompt.",
    )
    disable_custom_kernels: bool = Field(
        False,
        description="Compute with the model's own modules instead of fused kernels. Slower; set it to find out whether "
        "a kernel is at fault.",
    )

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
        128,
        gt=0,
        description="Largest number of requests that wait or run at once; the router refuses further ones with status "
        "429.",
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
            "takes more memory and delays running requests longer. Unset: in the launcher, what the GPU computes in "
            "one second, otherwise 4096; at most the model's positions and what fits in memory.",
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
        "ones with status 429. A client is an API key, or an address if there is none. Unset: no limit.",
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
        description="File that the router writes one row to for each step of the model: batch size, tokens, times. "
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


class HttpConfig(CommonConfig):
    """HTTP, tokenizer and clients"""

    hostname: str = Field(
        "0.0.0.0", description="Address or host name to listen on. The machine's own host name means every interface."
    )
    port: Annotated[Port, FieldSource(short="p")] = Field(3000, description="Port of the HTTP server.")
    prometheus_port: Port | None = Field(
        None, description="Second port, which serves /metrics only. Unset: /metrics on --port only."
    )
    api_key: Annotated[Secret | None, FieldSource()] = Field(
        None,
        description="Key that clients have to send as a bearer token. Unset, also without --api-key-file: no key is "
        "required.",
    )
    api_key_file: Path | None = Field(
        None, description="File with one bearer key on each line. Clients may use any of them, or --api-key."
    )
    adapter_fallback: bool = Field(
        False,
        description="Serve requests that name an unknown adapter with the base model, as TGI does. Default: the router "
        "refuses them if any adapter is loaded; without adapters, every name selects the base model.",
    )
    auth_all_routes: bool = Field(
        False,
        description="Require the key on all routes except /health, /ping and /ready. Default: only on routes that "
        "generate, tokenize or load adapters.",
    )
    cors_allow_origin: Annotated[Strings, FieldSource(repeated=True)] = Field(
        (),
        description="Origin that browsers may send requests from (CORS); repeat the flag for several. Unset: any "
        "origin.",
    )
    shutdown_delay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after SIGTERM during which /ready answers 503 and requests are still accepted, so that a "
        "load balancer can remove the server first.",
    )
    payload_limit: NonNegative = Field(2_000_000, description="Largest body of a request, in bytes.")
    tokenizer_name: str | None = Field(
        None,
        min_length=1,
        description="Tokenizer that counts and splits prompts: hub repository, local directory or `preset:NAME`. "
        "Unset: the model's.",
    )
    tokenizer_config_path: Path | None = Field(
        None, description="Path of a tokenizer_config.json, for the chat template, to use instead of the model's."
    )
    validation_workers: int = Field(
        2, description="Threads that tokenize prompts in the router. Raise it if requests wait for tokenization."
    )
    disable_grammar_support: bool = Field(False, description="Refuse requests with a grammar or a JSON schema.")
    allow_image_fetch: bool = Field(
        False,
        description="Fetch images that requests name by URL, from public addresses on ports 80 and 443. Default: only "
        "images inside the request are accepted.",
    )
    max_image_fetch_size: NonNegative = Field(33_554_432, description="Largest image that is fetched, in bytes.")
    image_fetch_hosts: Words = Field(
        (), description="Hosts from which images may be fetched. Unset: every host with a public address."
    )
    plain_text_decode_errors: bool = Field(
        False, description="Report a request body that cannot be decoded in plain text, as TGI does, instead of JSON."
    )
    usage_stats: Literal["on", "off", "no-stack"] = Field(
        "on",
        description="Accepted for compatibility with TGI, without effect: the server never sends usage statistics.",
    )
    vertex: bool = Field(False, description="Serve the routes that Vertex AI sets in the AIP_* variables.")
    aip_http_port: Annotated[Port | None, FieldSource(flag=False)] = Field(
        None, description="With --vertex: port of the HTTP server, instead of --port."
    )
    aip_predict_route: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, pattern=r"^/[^{}]*$", description="With --vertex: path of the route for predictions, instead of /vertex."
    )
    aip_health_route: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, pattern=r"^/[^{}]*$", description="With --vertex: path of the health check, instead of /health."
    )
    kserve: bool = Field(False, description="Serve the routes of the KServe v2 protocol too.")
    ngrok: bool = Field(False, description="Open an ngrok tunnel to the server.")
    ngrok_authtoken: Secret | None = Field(None, description="Authentication token for --ngrok.")
    ngrok_edge: str | None = Field(None, description="Edge for --ngrok.")
    compute_type: Annotated[str | None, FieldSource(flag=False)] = Field(
        None,
        description="Value of the x-compute-type header of responses. Unset: number of shards and name of the GPU.",
    )
    docker_label: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, description="Label of the container image; part of /info and of system_fingerprint."
    )
    tuned_by: str | None = Field(
        None,
        description="Study and trial that chose these settings, as STUDY/TRIAL or STUDY/TRIAL/confirmed; part of "
        "/info. `tgi-tune export` writes it.",
    )
    launch_settings: Annotated[str | None, FieldSource(flag=False)] = Field(
        None, description="Set by the launcher: JSON with value, source and reason of each setting, for /config."
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
        description="true: divide the model over --num-shard devices, or over all visible devices, at least 2. false: "
        "--num-shard shards, or one. Unset: --num-shard shards, or one for each device in CUDA_VISIBLE_DEVICES and "
        "similar variables, or one.",
    )
    num_shard: Annotated[int | None, Tunable(1, 8)] = Field(
        None,
        ge=0,
        description="Number of shards: processes that divide one model, each on its own device. Use several if the "
        "model does not fit on one device, or to make each step faster. Unset: see --sharded.",
    )
    max_input_length: Positive | None = Field(None, description="Earlier name of --max-input-tokens, in tokens.")
    shard_uds_path: str | None = Field(
        None,
        min_length=1,
        description="Prefix of the unix sockets of the model servers; the launcher appends -RANK. Unset: sockets in a "
        "private directory.",
    )
    master_addr: str | None = Field(
        None,
        min_length=1,
        description="Host at which the shards find each other over TCP. Unset: by a file, on one host.",
    )
    master_port: Port = Field(29500, description="Port of --master-addr.")
    num_nodes: Positive = Field(
        1,
        description="Number of hosts that share one model, each with --num-shard shards. Needs --master-addr, and "
        "--shard-addr with the shards of all hosts.",
    )
    node_rank: NonNegative = Field(0, description="Index of this host, from 0. Host 0 runs the router.")
    no_shards: bool = Field(False, description="Start the router only; it uses the model servers at --shard-addr.")
    env: Annotated[bool, FieldSource(short="e", env=())] = Field(
        False, description="Log a description of the environment (versions, platform, devices) at the start."
    )
    graceful_termination_timeout: Annotated[NonNegative, FieldSource(short="g")] = Field(
        90, description="Seconds that the launcher waits for a child process after SIGTERM before it sends SIGKILL."
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
    """Start a server for one model: a model server for each shard, and the router, which serves HTTP."""

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
    """Router

    Serve HTTP for model servers that run already: validate, queue and batch requests.
    """

    command: ClassVar[Command] = "router"

    master_shard_uds_path: str = Field(
        f"{DEFAULT_SOCKET_PREFIX}-0", min_length=1, description="Unix socket of the model server with rank 0."
    )
    shard_attention: Annotated[Attention, FieldSource(flag=False, env=("ATTENTION",))] = Field(
        "auto",
        description="Value of --attention of the model server, which sets the block size. Used with --grpc-schema v2 "
        "only.",
    )


class ShardConfig(ModelConfig):
    """Model server

    Load a model, or one shard of it, and compute the batches that a router sends.
    """

    command: ClassVar[Command] = "serve"

    model_id: PositionalModel
    sharded: Annotated[bool, FieldSource(env=())] = Field(
        False,
        description="This process is one of several shards; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT have to be "
        "set.",
    )
    uds_path: Annotated[str, FieldSource(env=())] = Field(
        DEFAULT_SOCKET_PREFIX,
        min_length=1,
        description="Prefix of the unix socket to listen on; the model server appends -RANK.",
    )
    listen: Annotated[str | None, FieldSource(env=())] = Field(
        None,
        min_length=1,
        description="TCP address to listen on instead of the socket, as host:port. Without a host: 127.0.0.1.",
    )
    logger_level: LoggerLevel = "INFO"

    @model_validator(mode="after")
    def _check_listen(self) -> Self:
        if self.shard_addr and self.listen is None:
            raise ValueError("`shard_addr` needs `listen`")
        return self


class DownloadConfig(HubConfig):
    """Download

    Download the weights of a model to the cache, and convert them to safetensors if necessary.
    """

    command: ClassVar[Command] = "download-weights"

    model_id: PositionalModel
    extension: str = Field(".safetensors", min_length=1, description="File extension of the weights to download.")
    auto_convert: bool = Field(
        True, description="Convert .bin and .pt weights to safetensors. --no-auto-convert: leave them as they are."
    )
    merge_lora: bool = Field(False, description="If the repository is a LoRA adapter, merge it into its base model.")
    logger_level: LoggerLevel = "INFO"


class QuantizeConfig(HubConfig):
    """Quantization

    Quantize a model by GPTQ, and write the result to a directory.
    """

    command: ClassVar[Command] = "quantize"

    model_id: PositionalModel
    output_dir: Annotated[Path, FieldSource(positional=True)] = Field(
        description="Directory that the quantized model is written to."
    )
    upload_to_model_id: str | None = Field(None, description="Hub repository that the quantized model is uploaded to.")
    percdamp: float = Field(
        0.01,
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="GPTQ dampening: fraction of the mean diagonal of the Hessian that is added to the diagonal. Raise "
        "it if the Hessian cannot be inverted.",
    )
    act_order: bool = Field(
        False,
        description="GPTQ activation order: quantize the inputs with the largest activations first. Often more "
        "accurate; slower with some kernels.",
    )
    groupsize: int | None = Field(
        None,
        description="Number of inputs that share one scale, in GPTQ. A smaller group is more accurate and larger. -1: "
        "one group for all inputs. Unset: the largest of 128, 64, 32 and 16 that divides the inputs of every layer.",
    )
    bits: Annotated[int, FieldSource(env=())] = Field(
        4, description="Bits of each weight: 2, 4 or 8. Fewer bits take less memory and are less accurate."
    )
    sym: Annotated[bool, FieldSource(env=(), takes_value=True)] = Field(
        True,
        description="Symmetric quantization: the zero point is the middle of the range. false: each group has its own "
        "zero point.",
    )
    static_groups: Annotated[bool, FieldSource(env=())] = Field(
        False,
        description="With --act-order: keep neighbouring inputs in one group, so that inference does not reorder them.",
    )
    calibration_file: Annotated[Path | None, FieldSource(env=())] = Field(
        None,
        description="Text file for calibration. Unset: WikiText-2 from the hub; for a preset, a text in the package.",
    )
    nsamples: Annotated[Positive, FieldSource(env=())] = Field(
        128, description="Number of windows of the calibration text to use. More are slower and more accurate."
    )
    seqlen: Annotated[Positive | None, FieldSource(env=())] = Field(
        None, description="Length of each window, in tokens. Unset: 2048, or the model's positions if these are fewer."
    )
    seed: Annotated[int, FieldSource(env=())] = Field(0, description="Seed of the random choice of windows.")
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
