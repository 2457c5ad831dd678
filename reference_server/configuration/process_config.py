"""Settings of the processes that the launcher starts: shards, hosts and their addresses."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from reference_server.configuration.common_config import CommonConfig
from reference_server.configuration.config_fields import (
    FieldSource,
    NonNegative,
    Port,
    Positive,
    TrueOrFalse,
    Tunable,
)


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
