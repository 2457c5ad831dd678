"""Sharded families, over gloo on one machine: the ranks together generate the ids that one rank generates."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reference_server.errors import UnsupportedError
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.models.families import FAMILIES
from reference_server.model_server.models.tensor_parallel.plans import PLANS
from reference_server.model_server.options import EngineOptions
from tests.reference_server.model_server.models.test_modelling_import import UNUSED
from tests.support.models.adapters import save_adapter
from tests.support.models.checkpoints.quantized_checkpoints import save_quantized
from tests.support.models.rank_process import run_load, run_rank
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import make_tiny_model, save_tiny_model

# One config per family. Two ranks share a K/V head in Qwen2 and divide them elsewhere.
ONE_OF_EACH = {config["model_type"]: name for name, config in reversed(CONFIGS.items())}
AT_TWO = [
    *(ONE_OF_EACH[model_type] for model_type in PLANS if model_type in ONE_OF_EACH),
    *("bloom-6-heads", "llama-tied-llama3-rope", "mpt-6-heads", "gpt-bigcode-many-heads", "stablelm-parallel"),
    *("falcon-groups", "falcon-serial", "falcon-alibi"),
]
AT_FOUR = ("llama", "bloom", "mixtral", "falcon-groups", "olmo2")
# Experts, interleaved projections with ALiBi, latent attention, and a norm of all heads. Models with adapters and
# quantized ones below have separate, packed and transposed projections and a shared K/V head. The others run in the
# slow test.
SHORT = ("mixtral", "bloom-6-heads", "deepseek-v3", "olmo2")

# GPT-2 has transposed weights, Phi-3 packed projections; with act-order, groups are spread over the ranks.
QUANTIZED = [
    *(("llama", method) for method in ("gptq-act-order", "awq", "fp8-block", "ct-int4-zeros", "ct-int8")),
    *(("gpt2", "gptq"), ("phi3", "awq"), ("mixtral", "gptq")),
]
# Llama's quantized weights run with adapters below.
QUANTIZED_SHORT = [("gpt2", "gptq"), ("phi3", "awq")]

# Two ranks divide the K/V heads of Llama and share that of Qwen2.
EIGHT_BIT_CACHES = [("llama", "fp8_e4m3fn"), ("qwen2", "fp8_e5m2")]

# Separate and packed projections, a K/V head that both ranks hold, transposed weights, and quantized ones.
WITH_ADAPTERS = ("llama-tied-llama3-rope", "qwen2-sharded", "gpt2")
QUANTIZED_WITH_ADAPTERS = ("gptq-act-order", "awq", "ct-int8")

# As a shard starts: without the compiler, whose import takes two seconds.
RANK_PROCESS = """
from reference_server.model_server.models.modelling_import import import_modelling
import_modelling()
from tests.support.models.rank_process import main
main()
"""

RankResults = list[dict[str, Any]]
"""Results of one model, by rank."""


@dataclass(frozen=True)
class Ranks:
    """results: by the keys of the models. modules: the modules that the processes of the other ranks loaded."""

    results: dict[Any, RankResults]
    modules: set[str]


def run_ranks(world_size: int, directories: dict[Any, Path], rendezvous: Path) -> Ranks:
    """Run the scripted load on each model with rank 0 here and the others as processes."""
    command = [sys.executable, "-c", RANK_PROCESS]
    arguments = [str(world_size), str(rendezvous), *map(str, directories.values())]
    processes = [
        subprocess.Popen(
            [*command, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(1, world_size)
    ]
    try:
        # In a thread, because the test may run in an event loop.
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(asyncio.run, run_rank(0, world_size, rendezvous, directories.values()))
            outputs = []
            for process in processes:
                output, errors = process.communicate()
                assert process.returncode == 0, errors[-2000:]
                outputs.append(json.loads(output.splitlines()[-1]))
            results = zip(first.result(), *(output["results"] for output in outputs), strict=True)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return Ranks(
        dict(zip(directories, map(list, results), strict=True)),
        {name for output in outputs for name in output["modules"]},
    )


def save_plain(directory: Path, names: Iterable[str]) -> dict[Any, Path]:
    return {name: save_tiny_model(directory / name, name) for name in names}


def save_all_quantized(directory: Path, cases: Iterable[tuple[str, str]]) -> dict[Any, Path]:
    sizes = {"llama": {"hidden_size": 64, "intermediate_size": 128}, "gpt2": {"n_embd": 64}}
    sizes |= {"phi3": sizes["llama"], "mixtral": {"hidden_size": 64}}
    return {
        (name, method): save_quantized(directory / f"{name}-{method}", name, method, **sizes[name])[0]
        for name, method in cases
    }


def save_all_with_adapters(directory: Path) -> dict[Any, Path]:
    """Models with two adapters each, which the scripted load uses."""
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    saved = {name: save_tiny_model(directory / f"{name}-adapters", name) for name in WITH_ADAPTERS}
    for method in QUANTIZED_WITH_ADAPTERS:
        saved[method] = save_quantized(directory / f"{method}-adapters", "llama", method, **sizes)[0]
    for name, path in saved.items():
        model = make_tiny_model(name) if name in WITH_ADAPTERS else make_tiny_model("llama", **sizes)
        for rank in (2, 5):
            save_adapter(path / "adapters" / f"rank-{rank}", model, rank, seed=rank)
    return {(name, "adapters"): path for name, path in saved.items()}


async def assert_equal_to_one_rank(results: RankResults, directory: Path, max_bytes: float) -> None:
    world_size, alone = len(results), await run_load(directory, rank=0, world_size=1)
    # Request i is answered by rank i % world_size.
    assert [set(rank["outcomes"]) for rank in results] == [
        {str(id_) for id_ in range(5) if id_ % world_size == rank} for rank in range(world_size)
    ]
    assert {id_: ids for rank in results for id_, ids in rank["outcomes"].items()} == alone["outcomes"], directory
    assert len({rank["tokens"] for rank in results}) == 1
    assert all(rank["bytes"] < max_bytes * alone["bytes"] for rank in results), directory


@dataclass(frozen=True)
class TwoRanks:
    """Checkpoints, and the results of two ranks on them."""

    directories: dict[Any, Path]
    results: dict[Any, RankResults]
    modules: set[str]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """One pair of processes for all models of the short suite."""
    directory = tmp_path_factory.mktemp("two-ranks")
    directories = save_plain(directory, SHORT) | save_all_quantized(directory, QUANTIZED_SHORT)
    directories |= save_all_with_adapters(directory)
    for name, cache in EIGHT_BIT_CACHES:
        saved = save_tiny_model(directory / f"{name}-{cache}", name)
        directories[name, cache] = saved.with_name(f"{saved.name}@{cache}")
    ranks = run_ranks(2, directories, directory / "rendezvous")
    return TwoRanks(directories, ranks.results, ranks.modules)


@pytest.mark.xdist_group("two ranks")
@pytest.mark.timeout(400)
async def test_model_server_M23_two_ranks_generate_the_ids_of_one(two_ranks: TwoRanks) -> None:
    for name in SHORT:
        await assert_equal_to_one_rank(two_ranks.results[name], two_ranks.directories[name], max_bytes=0.7)


@pytest.mark.xdist_group("two ranks")
@pytest.mark.timeout(400)
async def test_two_ranks_with_quantized_weights_generate_the_ids_of_one(two_ranks: TwoRanks) -> None:
    for case in QUANTIZED_SHORT:
        await assert_equal_to_one_rank(two_ranks.results[case], two_ranks.directories[case], max_bytes=0.75)


@pytest.mark.xdist_group("two ranks")
@pytest.mark.timeout(400)
async def test_two_ranks_with_an_eight_bit_cache_generate_the_ids_of_one(two_ranks: TwoRanks) -> None:
    for case in EIGHT_BIT_CACHES:
        await assert_equal_to_one_rank(two_ranks.results[case], two_ranks.directories[case], max_bytes=0.75)


@pytest.mark.xdist_group("two ranks")
@pytest.mark.timeout(400)
async def test_two_ranks_with_adapters_generate_the_ids_of_one(two_ranks: TwoRanks) -> None:
    for name in (*WITH_ADAPTERS, *QUANTIZED_WITH_ADAPTERS):
        case = (name, "adapters")
        await assert_equal_to_one_rank(two_ranks.results[case], two_ranks.directories[case], max_bytes=0.9)


@pytest.mark.xdist_group("two ranks")
@pytest.mark.timeout(400)
def test_a_shards_process_imports_no_compiler(two_ranks: TwoRanks) -> None:
    assert "transformers.modeling_utils" in two_ranks.modules
    assert two_ranks.modules.isdisjoint(UNUSED)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_two_ranks_generate_the_ids_of_one_for_all_other_models(tmp_path: Path) -> None:
    plain = save_plain(tmp_path, set(AT_TWO) - set(SHORT))
    quantized = save_all_quantized(tmp_path, set(QUANTIZED) - set(QUANTIZED_SHORT))

    results = run_ranks(2, plain | quantized, tmp_path / "rendezvous").results

    for case, directory in (plain | quantized).items():
        await assert_equal_to_one_rank(results[case], directory, max_bytes=0.75 if case in quantized else 0.7)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_model_server_M23_four_ranks_generate_the_ids_of_one(tmp_path: Path) -> None:
    directories = save_plain(tmp_path, AT_FOUR)

    results = run_ranks(4, directories, tmp_path / "rendezvous").results

    for name, directory in directories.items():
        await assert_equal_to_one_rank(results[name], directory, max_bytes=0.7)


@pytest.mark.parametrize("family", [each for each in FAMILIES if each.model_type not in PLANS and not each.has_images])
def test_a_family_without_a_plan_is_refused_by_name(tmp_path: Path, family: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.model_type}))
    options = EngineOptions(str(tmp_path), dtype="float32", load_format="dummy")

    with pytest.raises(UnsupportedError, match=f"sharded {family.name} is not supported"):
        loader.load(options, loader.locate(options), RankGroup(0, 2))


@pytest.mark.parametrize(
    ("name", "world_size", "reason"),
    [
        ("llama", 3, "num_attention_heads 4 and num_key_value_heads 2, which cannot be divided over 3 shards"),
        ("bloom-6-heads", 4, "num_attention_heads 6 and num_key_value_heads 6, which cannot be divided over 4 shards"),
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
