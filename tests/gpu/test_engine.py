"""The engine on a GPU: the same ids as on a CPU, with and without graphs; the host waits once a step, on a copy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from reference_server.adapter_source import AdapterSource
from reference_server.messages import ChooserParameters
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.device import no_waits
from tests.gpu.conftest import GRAPH_SIZES, loaded
from tests.support.models.adapters import merged, save_adapter
from tests.support.models.random_calls import RandomCalls
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import generate_alone, make_tiny_model, random_prompt, save_tiny_model
from tests.support.models.tiny_shards import SEEDED, warm_up

pytestmark = pytest.mark.gpu

PROMPTS = [random_prompt(length) for length in (4, 20, 2, 11)]


async def test_model_server_M1_ids_equal_generate_alone(shard: LocalShard) -> None:
    await warm_up(shard, max_total_tokens=128)
    driver, model = ShardDriver(shard), make_tiny_model("llama")

    outcomes = await driver.run(*(driver.request(id_, prompt) for id_, prompt in enumerate(PROMPTS)))

    assert [outcome.ids for outcome in outcomes] == [generate_alone(model, prompt, 10) for prompt in PROMPTS]


async def test_steps_are_captured(shard: LocalShard) -> None:
    await warm_up(shard, max_total_tokens=128)

    graphs = shard.engine.model.graphs
    assert graphs is not None
    assert graphs.sizes == list(GRAPH_SIZES)


async def test_a_step_that_synchronizes_is_not_captured_and_still_runs(
    gpu: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DBRX reads on the host which experts are used."""
    for shard in loaded(save_tiny_model(tmp_path, "dbrx")):
        await warm_up(shard, max_total_tokens=128)
        driver = ShardDriver(shard)

        outcome = (await driver.run(driver.request(1, PROMPTS[1], 6)))[0]

        assert "cannot be captured in a CUDA graph" in caplog.text
        assert outcome.ids == generate_alone(make_tiny_model("dbrx"), PROMPTS[1], 6)


async def test_graphs_and_run_ahead_change_no_token(shard: LocalShard, plain: LocalShard) -> None:
    results = []
    for each in (shard, plain):
        await warm_up(each, 16, max_total_tokens=128)
        results.append(await RandomCalls(each, seed=4).make(120))

    assert results[0] == results[1]


async def test_model_server_M4_seeded_sampling_is_independent_of_the_batch(shard: LocalShard) -> None:
    await warm_up(shard, max_total_tokens=128)
    driver = ShardDriver(shard)
    alone = (await driver.run(driver.request(0, PROMPTS[1], parameters=SEEDED)))[0]

    mates = [driver.request(id_, prompt) for id_, prompt in enumerate(PROMPTS[:3], start=2)]
    together = (await driver.run(driver.request(1, PROMPTS[1], parameters=SEEDED), *mates))[0]

    assert together.ids == alone.ids


@pytest.mark.parametrize(
    "parameters",
    [ChooserParameters(), SEEDED, ChooserParameters(repetition_penalty=1.2, frequency_penalty=0.3)],
    ids=["greedy", "sampled", "penalised"],
)
async def test_a_decode_step_waits_once_on_a_copy(
    shard: LocalShard, parameters: ChooserParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    await warm_up(shard, max_total_tokens=128)
    driver = ShardDriver(shard)
    result = await driver.prefill(*(driver.request(id_, PROMPTS[id_], 30, parameters) for id_ in range(3)))
    result = await driver.decode((await driver.decode(result.batch)).batch)
    waits: list[Any] = []
    synchronize = torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        waits.append(event)
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", counted)
    with no_waits():
        for _ in range(8):
            result = await driver.decode(result.batch)

    assert len(waits) == 8


async def test_rows_of_one_batch_use_their_own_adapters(gpu: torch.device, directory: Path, tmp_path: Path) -> None:
    model = make_tiny_model("llama")
    two, five = save_adapter(tmp_path / "two", model, 2, seed=1), save_adapter(tmp_path / "five", model, 5, seed=2)
    adapters = (AdapterSource("two", str(two)), AdapterSource("five", str(five)))
    models = {None: model, "two": merged(model, two), "five": merged(model, five)}
    names = (None, "two", "five", "two")
    for shard in loaded(directory, adapters=adapters):
        await warm_up(shard, max_total_tokens=128)
        driver = ShardDriver(shard)

        requests = [
            driver.request(id_, prompt, adapter_id=name)
            for id_, (name, prompt) in enumerate(zip(names, PROMPTS, strict=True))
        ]
        outcomes = await driver.run(*requests)

        expected = [generate_alone(models[name], prompt, 10) for name, prompt in zip(names, PROMPTS, strict=True)]
        assert [outcome.ids for outcome in outcomes] == expected
