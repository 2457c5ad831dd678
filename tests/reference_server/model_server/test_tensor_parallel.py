"""Two ranks on one machine over gloo: the same tokens as one rank, each request's from exactly one of them."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from reference_server.errors import UnsupportedError
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from tests.support.rank_process import run_load
from tests.support.tiny_models import save_tiny_model

SHARDED = ("llama", "qwen2-sharded", "gpt-neox")


async def run_ranks(world_size: int, rendezvous: Path, directories: list[Path]) -> list[list[dict[str, Any]]]:
    """Per rank, what `rank_process` printed: one result a model."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.rank_process"),
            *(str(rank), str(world_size), str(rendezvous), *map(str, directories)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors.decode()[-2000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


async def test_model_server_M23_two_ranks_generate_what_one_does(tmp_path: Path) -> None:
    directories = [save_tiny_model(tmp_path / name, name) for name in SHARDED]

    ranks = await run_ranks(2, tmp_path / "rendezvous", directories)

    for directory, first, second in zip(directories, *ranks, strict=True):
        alone = await run_load(directory, rank=0, world_size=1)
        assert [set(rank["outcomes"]) for rank in (first, second)] == [{"0", "2", "4"}, {"1", "3"}]
        assert first["outcomes"] | second["outcomes"] == alone["outcomes"]
        assert first["tokens"] == second["tokens"]
        assert first["bytes"] < alone["bytes"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "sharded GPT-2 is not supported"),
        ("bloom", "sharded BLOOM is not supported"),
        ("qwen2", "num_key_value_heads is 1, which 2 shards cannot divide"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_by_name(tmp_path: Path, name: str, reason: str) -> None:
    options = EngineOptions(str(save_tiny_model(tmp_path, name)), dtype="float32")

    with pytest.raises(UnsupportedError, match=reason):
        loader.load(options, loader.locate(options), RankGroup(0, 2))
