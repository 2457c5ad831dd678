"""NCCL: one rank; two ranks on two GPUs, or refused on one GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.distributed import Rendezvous, _collective_device, initialise
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import random_prompt
from tests.support.models.tiny_shards import warm_up

pytestmark = pytest.mark.gpu

RANK_PROGRAM = """
import sys
from pathlib import Path

import torch

from reference_server.errors import StartupError
from reference_server.model_server.distributed import Rendezvous, open_group

rank, place = int(sys.argv[1]), Path(sys.argv[2])
try:
    group = open_group(rank, 2, Rendezvous(file=place), "cuda")
except StartupError as error:
    print(error)
    raise SystemExit(0)
ids = group.broadcast(torch.tensor([10 + rank, 20 + rank], device="cuda"))
least = group.minimum(100 - rank)
group.barrier()
print(ids.tolist(), least)
group.close()
"""


def test_a_group_of_one_rank_uses_nccl(gpu: torch.device, tmp_path: Path) -> None:
    initialise(0, 1, Rendezvous(file=tmp_path / "rendezvous"), gpu.type)
    try:
        assert dist.get_backend() == "nccl"
        ids = torch.tensor([3, 4], device=gpu)
        dist.broadcast(ids, src=0)
        least = torch.tensor(7, device=_collective_device())
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.barrier()
        assert (ids.tolist(), int(least)) == ([3, 4], 7)
    finally:
        dist.destroy_process_group()


async def test_a_process_group_does_not_change_the_ids(plain: LocalShard, gpu: torch.device, tmp_path: Path) -> None:
    await warm_up(plain)
    driver = ShardDriver(plain)
    alone = (await driver.run(driver.request(1, random_prompt(9), 6)))[0].ids
    initialise(0, 1, Rendezvous(file=tmp_path / "rendezvous"), gpu.type)
    try:
        assert (await driver.run(driver.request(2, random_prompt(9), 6)))[0].ids == alone
    finally:
        dist.destroy_process_group()


def test_two_ranks_meet_on_two_gpus_and_are_refused_on_one(gpu: torch.device, tmp_path: Path) -> None:
    place = str(tmp_path / "rendezvous")
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK_PROGRAM, str(rank), place], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]

    outputs = [rank.communicate(timeout=150)[0] for rank in ranks]

    if torch.cuda.device_count() > 1:
        assert outputs == ["[10, 20] 99\n"] * 2
    else:
        assert all("ranks 0 and 1 share one GPU" in output for output in outputs)
