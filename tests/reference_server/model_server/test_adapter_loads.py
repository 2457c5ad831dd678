"""Adapters loaded while a shard serves: refusals, steps during the reading, unloading under running sequences."""

import functools
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_server.adapter_source import AdapterSource
from reference_server.configuration.common_config import Transport
from reference_server.errors import ShardError
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.transport.shard import Shard, until_loaded
from tests.support.models.adapters import merged, save_adapter
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import generate_alone, make_tiny_model, random_prompt, save_tiny_model
from tests.support.models.tiny_shards import tiny_options, warm_up
from tests.support.wire.wire_shard import served, socket_urls

MIB = 1 << 20
PROMPT = random_prompt(12)
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj.lora_"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
async def shard(base: Path) -> AsyncIterator[LocalShard]:
    """No adapter is loaded yet; there is room for 8 MiB."""
    shard = LocalShard.load(tiny_options(base, adapter_bytes=8 * MIB))
    await warm_up(shard)
    yield shard
    shard.close()


def nbytes_of(shard: LocalShard) -> int:
    adapters = shard.engine.model.adapters
    assert adapters is not None
    return adapters.nbytes


async def load(shard: Shard, name: str, directory: Path) -> int:
    return await until_loaded(functools.partial(shard.load_adapter, AdapterSource(name, str(directory))))


def with_settings(**settings: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        path = directory / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    return rewrite


def moved(tensors: dict[str, torch.Tensor], name: str) -> None:
    """The update of a layer's queries, as one of `name`."""
    for factor in "AB":
        tensors[f"base_model.model.{name}.lora_{factor}.weight"] = tensors.pop(f"{Q_PROJ}{factor}.weight")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "DoRA": (with_settings(use_dora=True), "`use_dora` True is not supported"),
    "biases": (with_settings(bias="all"), "`bias` 'all' is not supported"),
    "biases of LoRA": (with_settings(lora_bias=True), "`lora_bias` True is not supported"),
    "ranks by pattern": (with_settings(rank_pattern={"q_proj": 4}), "`rank_pattern` {'q_proj': 4} is not supported"),
    "modules to save": (with_settings(modules_to_save=["lm_head"]), "`modules_to_save` ['lm_head'] is not supported"),
    "token embeddings": (with_settings(trainable_token_indices=[1]), "`trainable_token_indices` [1] is not supported"),
    "another method": (with_settings(peft_type="LOHA"), "`peft_type` is 'LOHA', but must be LORA"),
    "embeddings": (
        with_tensors(
            lambda each: each.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)})
        ),
        "embed_tokens.lora_embedding_A is not a LoRA factor of a linear layer",
    ),
    "unknown module": (
        with_tensors(lambda each: moved(each, "model.layers.1.self_attn.x_proj")),
        "changes model.layers.1.self_attn.x_proj, which is not a linear layer of LlamaForCausalLM; its linear layers "
        "are q_proj,",
    ),
    "a layer that the model lacks": (
        with_tensors(lambda each: moved(each, "model.layers.9.self_attn.q_proj")),
        "changes model.layers.9.self_attn.q_proj, which is not a linear layer",
    ),
    "output head": (with_tensors(lambda each: moved(each, "lm_head")), "changes lm_head, which is not a linear layer"),
    "wrong shape": (
        with_tensors(lambda each: moved(each, "model.layers.1.mlp.down_proj")),
        "model.layers.1.mlp.down_proj is for a weight of shape (",
    ),
    "wrong rank": (
        with_tensors(lambda each: each.update({f"{Q_PROJ}A.weight": torch.ones(5, 1)})),
        "model.layers.1.self_attn.q_proj has factors",
    ),
    "one factor": (
        with_tensors(lambda each: each.pop(f"{Q_PROJ}B.weight")),
        "model.layers.1.self_attn.q_proj has only one of lora_A and lora_B, but both are needed",
    ),
    "no weights": (lambda directory: (directory / "adapter_model.safetensors").unlink(), "has neither adapter_model."),
    "damaged weights": (
        lambda directory: (directory / "adapter_model.safetensors").write_bytes(b"\xff" * 64),
        "adapter_model.safetensors",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_model_server_D25_an_unsupported_adapter_is_refused_with_the_setting_and_the_path(
    kind: str, shard: LocalShard, tmp_path: Path
) -> None:
    change, expected = REFUSED[kind]
    directory = save_adapter(tmp_path / "strange", make_tiny_model("llama"), rank=2)
    change(directory)

    with pytest.raises(ShardError, match=f"{re.escape(str(directory))}.*{re.escape(expected)}"):
        await load(shard, "strange", directory)

    assert ((await shard.info()).adapters, nbytes_of(shard)) == ((), 0)
    assert await load(shard, "good", save_adapter(tmp_path / "good", make_tiny_model("llama"), rank=2)) > 0


async def test_an_adapter_of_another_architecture_is_refused(shard: LocalShard, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", "gpt2")
    model = make_tiny_model("llama")
    directory = save_adapter(tmp_path / "strange", model, rank=2, base_model_name_or_path=str(other))

    with pytest.raises(ShardError, match=f"{directory}: its base model {other} is .*GPT2LMHeadModel"):
        await load(shard, "strange", directory)


async def test_adapters_take_no_more_than_their_memory(shard: LocalShard, base: Path, tmp_path: Path) -> None:
    directory = save_adapter(tmp_path / "a", make_tiny_model("llama"), rank=8)
    nbytes = await load(shard, "a", directory)
    shard = LocalShard.load(tiny_options(base, adapter_bytes=2 * nbytes - 1))
    try:
        await warm_up(shard)
        first = await load(shard, "a", directory)
        with pytest.raises(ShardError, match="raise `--adapter-memory-mib`"):
            await load(shard, "b", directory)
        await shard.unload_adapter("a")
        freed = nbytes_of(shard)
        again = await load(shard, "b", directory)
    finally:
        shard.close()

    assert (first, freed, again) == (nbytes, 0, nbytes)


async def test_steps_go_on_while_the_files_of_an_adapter_are_read(shard: LocalShard, tmp_path: Path) -> None:
    """The config is a pipe: reading it ends when the test writes."""
    directory = save_adapter(tmp_path / "slow", make_tiny_model("llama"), rank=2)
    config = directory / "adapter_config.json"
    content = config.read_bytes()
    config.unlink()
    os.mkfifo(config)
    driver = ShardDriver(shard)
    result = await driver.prefill(driver.request(0, PROMPT, 30))
    source = AdapterSource("slow", str(directory))

    begun = [await shard.load_adapter(source)]
    for _ in range(12):
        result = await driver.decode(result.batch)
        begun.append(await shard.load_adapter(source))
    writer = threading.Thread(target=config.write_bytes, args=(content,))
    writer.start()
    nbytes = await until_loaded(functools.partial(shard.load_adapter, source))
    writer.join()
    await driver.finish(result)

    assert begun == [None] * 13
    assert nbytes > 0
    assert driver.outcomes[0].ids == generate_alone(make_tiny_model("llama"), PROMPT, 30)


async def test_a_load_that_hangs_can_be_given_up(shard: LocalShard, tmp_path: Path) -> None:
    directory = save_adapter(tmp_path / "slow", make_tiny_model("llama"), rank=2)
    (directory / "adapter_config.json").unlink()
    os.mkfifo(directory / "adapter_config.json")
    assert await shard.load_adapter(AdapterSource("slow", str(directory))) is None

    await shard.unload_adapter("slow")

    good = save_adapter(tmp_path / "good", make_tiny_model("llama"), rank=2)
    assert await load(shard, "slow", good) > 0


async def test_unloading_leaves_running_sequences_their_adapter_and_then_frees_it(
    shard: LocalShard, tmp_path: Path
) -> None:
    model = make_tiny_model("llama")
    directories = {name: save_adapter(tmp_path / name, model, 2, seed=seed) for seed, name in enumerate("ab")}
    nbytes = await load(shard, "a", directories["a"])
    driver = ShardDriver(shard)
    result = await driver.prefill(driver.request(0, PROMPT, adapter_id="a"), driver.request(1, PROMPT))
    result = await driver.decode(result.batch)

    await shard.unload_adapter("a")
    while_running = nbytes_of(shard)
    # Another one takes a slot of its own, not that of the running sequence.
    await load(shard, "b", directories["b"])
    joined = await driver.prefill(driver.request(2, PROMPT, adapter_id="b"), cached=result.batch)
    await driver.finish(joined)

    expected = {0: merged(model, directories["a"]), 1: model, 2: merged(model, directories["b"])}
    assert {id_: driver.outcomes[id_].ids for id_ in expected} == {
        id_: generate_alone(each, PROMPT, 10) for id_, each in expected.items()
    }
    assert (while_running, nbytes_of(shard)) == (nbytes, nbytes)
    assert (await shard.info()).adapters == ("b",)
    with pytest.raises(ShardError, match="no adapter 'a' is loaded"):
        await shard.unload_adapter("a")


@pytest.mark.parametrize("transport", ["grpc", "link"])
async def test_adapters_are_loaded_used_and_unloaded_over(
    transport: Transport, shard: LocalShard, tmp_path: Path
) -> None:
    model = make_tiny_model("llama")
    directory = save_adapter(tmp_path / "a", model, rank=3)
    bad = save_adapter(tmp_path / "bad", model, rank=3, use_dora=True)

    async with served([shard], socket_urls(tmp_path), "v3", transport) as group:
        await group.info()
        nbytes = await load(group, "a", directory)
        names = (await group.info()).adapters
        driver = ShardDriver(group)
        outcomes = await driver.run(driver.request(0, PROMPT, adapter_id="a"), driver.request(1, PROMPT))
        with pytest.raises(ShardError, match=f"{bad}.*`use_dora` True is not supported"):
            await load(group, "bad", bad)
        await group.unload_adapter("a")
        after = await driver.run(driver.request(2, PROMPT))

    plain = generate_alone(model, PROMPT, 10)
    assert [each.ids for each in (*outcomes, *after)] == [
        generate_alone(merged(model, directory), PROMPT, 10),
        plain,
        plain,
    ]
    assert (names, (nbytes > 0, nbytes_of(shard))) == (("a",), (True, 0))
