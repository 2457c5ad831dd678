import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

from reference_server.errors import StartupError
from reference_server.model_server.distributed import RankGroup, Rendezvous, open_group
from tests.support.ports import free_port

# What each rank of a group of two prints: its share of the requests, rank 0's ids, the least number.
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


def test_one_rank_initialises_nothing():
    group = open_group(0, 1, Rendezvous(), "cpu")

    assert group == RankGroup(0, 1)
    assert not torch.distributed.is_initialized()
    assert group.broadcast(torch.tensor([3, 4])).tolist() == [3, 4]
    assert group.minimum(7) == 7
    assert group.owns(5)
    group.barrier()
    group.close()


@pytest.mark.parametrize("by", ["file", "tcp"])
def test_model_server_M23_two_ranks_meet_and_share_the_requests(by, tmp_path):
    place = str(tmp_path / "rendezvous") if by == "file" else str(free_port())

    first, second = outputs([start(rank, place) for rank in (0, 1)])

    assert first == "[0, 2, 4] [10, 20] 99\n"
    assert second == "[1, 3, 5] [10, 20] 99\n"


def test_more_cuda_ranks_than_devices_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(StartupError, match="2 shards need as many GPUs, but 1 are visible"):
        open_group(0, 2, Rendezvous(file=tmp_path / "rendezvous"), "cuda")


def test_address_of_the_rendezvous():
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
