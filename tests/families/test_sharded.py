"""Every family that is sharded, over gloo on one machine: what the ranks generate together is what one generates."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from reference_server.errors import UnsupportedError
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.models.families import FAMILIES
from reference_server.model_server.models.parallel import PLANS
from reference_server.model_server.options import EngineOptions
from tests.support.rank_process import run_load
from tests.support.tiny_configs import CONFIGS
from tests.support.tiny_models import save_tiny_model

# One config a family; K/V heads are shared by two ranks in Qwen2, and cut elsewhere.
ONE_OF_EACH = {config["model_type"]: name for name, config in reversed(CONFIGS.items())}
AT_TWO = [*(ONE_OF_EACH[model_type] for model_type in PLANS), "bloom-6-heads", "llama-tied-llama3-rope"]
AT_FOUR = ("llama", "bloom", "mixtral")


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


async def sharded_equals_alone(world_size: int, names: list[str], directory: Path) -> None:
    directories = [save_tiny_model(directory / name, name) for name in names]

    ranks = await run_ranks(world_size, directory / "rendezvous", directories)

    for name, path, results in zip(names, directories, zip(*ranks, strict=True), strict=True):
        alone = await run_load(path, rank=0, world_size=1)
        # Each request is answered by one rank: the one whose number its id has, modulo the ranks.
        assert [set(rank["outcomes"]) for rank in results] == [
            {str(id_) for id_ in range(5) if id_ % world_size == rank} for rank in range(world_size)
        ]
        assert {id_: ids for rank in results for id_, ids in rank["outcomes"].items()} == alone["outcomes"], name
        assert len({rank["tokens"] for rank in results}) == 1
        assert all(rank["bytes"] < 0.7 * alone["bytes"] for rank in results), name


async def test_model_server_M23_two_ranks_generate_what_one_does(tmp_path: Path) -> None:
    await sharded_equals_alone(2, AT_TWO, tmp_path)


async def test_model_server_M23_four_ranks_generate_what_one_does(tmp_path: Path) -> None:
    await sharded_equals_alone(4, list(AT_FOUR), tmp_path)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.model_type not in PLANS])
def test_a_family_without_a_plan_is_refused_by_name(tmp_path: Path, family: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.model_type}))
    options = EngineOptions(str(tmp_path), dtype="float32", load_format="dummy")

    with pytest.raises(UnsupportedError, match=f"sharded {family.name} is not supported"):
        loader.load(options, loader.locate(options), RankGroup(0, 2))


@pytest.mark.parametrize(
    ("name", "world_size", "reason"),
    [
        ("llama", 3, "num_attention_heads is 4 and its num_key_value_heads 2, which 3 shards cannot divide"),
        ("bloom-6-heads", 4, "num_attention_heads is 6 and its num_key_value_heads 6, which 4 shards cannot divide"),
    ],
)
def test_heads_that_do_not_divide_are_refused_by_name(tmp_path: Path, name: str, world_size: int, reason: str) -> None:
    options = EngineOptions(str(save_tiny_model(tmp_path, name)), dtype="float32")

    with pytest.raises(UnsupportedError, match=reason):
        loader.load(options, loader.locate(options), RankGroup(0, world_size))


def test_a_size_that_does_not_divide_is_refused_by_name(tmp_path: Path) -> None:
    options = EngineOptions(str(save_tiny_model(tmp_path, "llama", intermediate_size=81)), dtype="float32")

    with pytest.raises(UnsupportedError, match=r"gate_proj: a size of 81 cannot be divided over 2 shards"):
        loader.load(options, loader.locate(options), RankGroup(0, 2))
