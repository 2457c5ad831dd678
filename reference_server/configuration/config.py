"""The settings of each program. Parts that several programs share are in `*_config.py`; each setting is declared once.

A field is a flag (`--max-total-tokens`), a variable (`MAX_TOTAL_TOKENS`), a TOML key (`max_total_tokens`) and a row of
docs/settings.md. `settings.py` reads these sources; these modules import pydantic only and read nothing.

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
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reference_server.configuration.batching_config import BatchingConfig
from reference_server.configuration.common_config import Command, HubConfig
from reference_server.configuration.config_fields import FieldSource, NonNegative, Port, Positive
from reference_server.configuration.http_config import HttpConfig
from reference_server.configuration.model_config import Attention, ModelConfig
from reference_server.configuration.process_config import ProcessConfig

DEFAULT_SOCKET_PREFIX = "/tmp/text-generation-server"

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
