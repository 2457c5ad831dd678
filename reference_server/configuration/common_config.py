"""Settings of the hub and of logs, and settings that the router and the model server share."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reference_server.configuration.config_fields import (
    FieldSource,
    Positive,
    Secret,
    Tunable,
    Words,
    argv_of,
    environ_of,
)

Transport = Literal["auto", "grpc", "link"]
Command = Literal["launcher", "router", "serve", "download-weights", "quantize", "benchmark"]

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
