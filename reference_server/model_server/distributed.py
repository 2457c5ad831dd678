"""The process group of a sharded model, and the collectives outside of the model's own.

One rank needs no group: nothing is initialised and every collective is the identity. Several ranks meet by TCP at the
master's address, or at a file if they share a machine, and use NCCL on CUDA and gloo on a CPU.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous as meet

from reference_server.errors import StartupError

TIMEOUT = timedelta(seconds=120)
"""Timeout of the rendezvous and of each collective."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting point of the ranks of a group; `file`, if set, is used instead of the address."""

    master_addr: str = "localhost"
    master_port: int = 29500
    file: Path | None = None

    @property
    def init_method(self) -> str:
        if self.file is not None:
            return f"file://{self.file.absolute()}"
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One rank of `world_size`. All ranks make the same collective calls in the same order."""

    rank: int = 0
    world_size: int = 1

    def owns(self, request_id: int) -> bool:
        """Whether this rank detokenizes a request and returns its generation."""
        return request_id % self.world_size == self.rank

    def broadcast(self, ids: Tensor) -> Tensor:
        """Copy rank 0's `ids` into those of every rank; shape and dtype are equal on all ranks."""
        if self.world_size > 1:
            dist.broadcast(ids, src=0)
        return ids

    def minimum(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        if self.world_size == 1:
            return value
        least = torch.tensor(value, dtype=torch.int64, device=_collective_device())
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


class Store(Protocol):
    """Key-value store that the ranks share before the group exists, as torch's stores."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes:
        """Wait for a key and return its value."""
        ...


def open_group(rank: int, world_size: int, rendezvous: Rendezvous, device_type: str) -> RankGroup:
    """Meet the other ranks; `device_type` is `cuda` or `cpu`. Raises StartupError if that fails.

    On CUDA, rank r makes visible device `r % device_count` the current one.
    """
    if world_size > 1:
        try:
            initialise(rank, world_size, rendezvous, device_type)
        except (RuntimeError, ValueError, OSError) as error:
            raise StartupError(
                f"rank {rank} of {world_size} could not join the others at {rendezvous.init_method}: {error}"
            ) from error
    return RankGroup(rank, world_size)


def initialise(rank: int, world_size: int, rendezvous: Rendezvous, device_type: str) -> None:
    """Start torch's process group, also for one rank: NCCL with one GPU for each rank, gloo on CPUs."""
    store, _, _ = next(meet(rendezvous.init_method, rank, world_size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    backend: dict[str, Any] = {"backend": "gloo"}
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        identity = f"{socket.gethostname()} {getattr(torch.cuda.get_device_properties(device), 'uuid', device.index)}"
        refuse_shared_devices(store, rank, world_size, identity)
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        backend = {"backend": "nccl", "device_id": device, "pg_options": options}
    dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=TIMEOUT, **backend)


def refuse_shared_devices(store: Store, rank: int, world_size: int, device: str) -> None:
    """Raise StartupError on every rank if two ranks have the same device, which NCCL does not support.

    device: a name of this rank's device that is unique over all nodes.
    """
    store.set(f"device of rank {rank}", device)
    ranks: dict[str, int] = {}
    for other in range(world_size):
        name = store.get(f"device of rank {other}").decode()
        first = ranks.setdefault(name, other)
        if first != other:
            raise StartupError(
                f"ranks {first} and {other} share one GPU ({name}): each of the {world_size} shards needs its own GPU"
            )


def _collective_device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
