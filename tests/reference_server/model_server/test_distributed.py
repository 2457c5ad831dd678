import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reference_server.errors import StartupError
from reference_server.model_server import distributed
from reference_server.model_server.distributed import TIMEOUT, RankGroup, Rendezvous, open_group
from tests.support.servers.ports import free_port

# Each rank of a group of two prints its requests, rank 0's ids and the minimum.
RANK_PROGRAM = """
import sys
from pathlib import Path

import torch

from reference_server.model_server.distributed import Rendezvous, open_group

rank, place = int(sys.argv[1]), sys.argv[2]
rendezvous = Rendezvous(master_port=int(place)) if place.isdecimal() else Rendezvous(file=Path(place))
group = open_group(rank, 2, rendezvous, "cpu")
ids = group.broadcast(torch.tensor([10 + rank, 20 + rank]))
least = group.minimum(100 - rank)
group.barrier()
print([number for number in range(6) if group.owns(number)], ids.tolist(), least)
group.close()
"""


def test_one_rank_needs_no_process_group():
    group = open_group(0, 1, Rendezvous(), "cpu")

    assert group == RankGroup(0, 1)
    assert not dist.is_initialized()
    assert group.broadcast(torch.tensor([3, 4])).tolist() == [3, 4]
    assert group.minimum(7) == 7
    assert group.owns(5)
    group.barrier()
    group.close()


# tests/families/test_sharded.py meets at a file, too.
@pytest.mark.slow
@pytest.mark.parametrize("by", ["tcp", "file"])
def test_model_server_M23_two_ranks_meet_and_share_the_requests(by, tmp_path):
    place = str(tmp_path / "rendezvous") if by == "file" else str(free_port())

    first, second = outputs([start(rank, place) for rank in (0, 1)])

    assert first == "[0, 2, 4] [10, 20] 99\n"
    assert second == "[1, 3, 5] [10, 20] 99\n"


@dataclass
class FakeNode:
    """A node with `gpus` GPUs, seen by one rank. `started`: the arguments of `init_process_group`."""

    name: str
    gpus: int
    store: Any
    current: torch.device | None = None
    started: dict[str, Any] = field(default_factory=dict)

    def open(self, rank: int, world_size: int) -> RankGroup:
        cuda = SimpleNamespace(
            device_count=lambda: self.gpus,
            get_device_properties=lambda device: SimpleNamespace(uuid=f"uuid-{device.index}"),
            set_device=lambda device: setattr(self, "current", device),
        )
        nccl = SimpleNamespace(Options=lambda is_high_priority_stream: "options")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "meet", lambda *_, **__: iter([(self.store, rank, world_size)]))
            patch.setattr(distributed.socket, "gethostname", lambda: self.name)
            patch.setattr(distributed.torch, "cuda", cuda)
            patch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
            patch.setattr(dist, "init_process_group", lambda **how: self.started.update(how))
            return open_group(rank, world_size, Rendezvous("node0"), "cuda")


def with_devices(store: dist.HashStore, devices: list[str]) -> dist.HashStore:
    for rank, device in enumerate(devices):
        store.set(f"device of rank {rank}", device)
    return store


def test_ranks_of_several_nodes_take_one_gpu_each():
    store = with_devices(dist.HashStore(), ["a uuid-0", "a uuid-1", "b uuid-0", "b uuid-1"])
    node = FakeNode("b", 2, store)

    group = node.open(3, 4)

    assert group == RankGroup(3, 4)
    assert node.current == torch.device("cuda", 1)
    assert (node.started["backend"], node.started["device_id"]) == ("nccl", torch.device("cuda", 1))
    assert (node.started["rank"], node.started["world_size"], node.started["timeout"]) == (3, 4, TIMEOUT)


def test_two_ranks_on_one_gpu_are_refused_on_both():
    store = with_devices(dist.HashStore(), ["a uuid-0", "a uuid-0"])

    for rank in (0, 1):
        with pytest.raises(StartupError, match=r"ranks 0 and 1 share one GPU \(a uuid-0\): each of the 2 shards needs"):
            FakeNode("a", 1, store).open(rank, 2)


def test_the_rendezvous_has_a_url():
    assert Rendezvous("::1", 29500).init_method == "tcp://[::1]:29500"
    assert Rendezvous("node0", 29500).init_method == "tcp://node0:29500"
    assert Rendezvous(file=Path("/a/b")).init_method == "file:///a/b"


def start(rank: int, place: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK_PROGRAM, str(rank), place],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])},
    )


def outputs(ranks: list[subprocess.Popen[str]]) -> list[str]:
    texts = []
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err
        texts.append(out)
    return texts
