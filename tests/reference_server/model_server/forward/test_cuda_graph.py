"""Captured decode steps, with a double that records the step on a CPU: buffers, padding rows, uploads."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reference_server.errors import ArgumentError
from reference_server.model_server.attention import select
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.forward import cuda_graph
from reference_server.model_server.forward.cuda_graph import CapturedStep, GraphedForward, graph_sizes
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.stepper import RunAhead
from tests.support.models.devices.graph_recorder import Recorder
from tests.support.models.devices.table_attention import TABLES
from tests.support.models.random_calls import RandomCalls
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import random_prompt, save_tiny_model
from tests.support.models.tiny_shards import tiny_options, warm_up

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def load(directory: Path, monkeypatch: pytest.MonkeyPatch, recorder: Recorder | None) -> LocalShard:
    """A shard that launches first, as on a GPU; with a recorder, one that captures its decode steps."""
    monkeypatch.setattr(select, "BACKENDS", (TABLES,))
    shard = LocalShard.load(tiny_options(directory, cpu_memory_gib=0.05))
    engine = shard.engine
    engine.stepper.run_ahead = RunAhead.BEFORE_READ
    if recorder is not None:
        forward = engine.model.forward
        assert isinstance(forward, RaggedForward)
        graphs = GraphedForward(forward, lambda: recorder, engine.info.block_size)
        engine.model = replace(engine.model, forward=graphs, graphs=graphs)
        engine.stepper.forward = graphs
        engine.options = replace(engine.options, cuda_graphs=SIZES)
    return shard


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def graphed(directory: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalShard]:
    shard = load(directory, monkeypatch, recorder)
    yield shard
    shard.close()


@pytest.fixture
def plain(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalShard]:
    shard = load(directory, monkeypatch, None)
    yield shard
    shard.close()


async def test_replayed_steps_choose_the_same_as_computed_steps(
    graphed: LocalShard, plain: LocalShard, recorder: Recorder
) -> None:
    results = []
    for shard in (graphed, plain):
        await warm_up(shard, 16, max_total_tokens=64)
        results.append(await RandomCalls(shard, seed=4).make(60))

    assert results[0] == results[1]
    assert recorder.num_replays > 30


async def test_a_smaller_batch_after_a_larger_one_gives_the_same_as_alone(graphed: LocalShard) -> None:
    await warm_up(graphed, 64, max_total_tokens=64)
    driver = ShardDriver(graphed)
    alone = (await driver.run(driver.request(1, random_prompt(9), 6)))[0].ids
    await driver.run(*(driver.request(10 + n, random_prompt(20 + n), 6) for n in range(4)))

    outcomes = await driver.run(driver.request(2, random_prompt(9), 6), driver.request(3, random_prompt(5), 6))

    assert outcomes[0].ids == alone


async def test_poisoned_padding_rows_change_nothing(graphed: LocalShard, plain: LocalShard) -> None:
    prompts = [random_prompt(length) for length in (3, 9, 17)]
    expected = []
    for shard in (plain, graphed):
        await warm_up(shard, 64, max_total_tokens=64)
        driver = ShardDriver(shard)
        graphs = shard.engine.model.graphs
        if graphs is not None:
            assert graphs.inputs is not None
            assert shard.engine.state.cache is not None
            with torch.inference_mode():
                graphs.inputs.input_ids.fill_(77)
                graphs.inputs.block_table.fill_(5)
                for layer in shard.engine.state.cache.layers:
                    layer.buffer[0] = float("nan")
        expected.append(
            [each.ids for each in await driver.run(*(driver.request(n, p, 6) for n, p in enumerate(prompts)))]
        )

    assert expected[1] == expected[0]


async def test_addresses_never_change_and_a_steady_step_uploads_only_ids(
    graphed: LocalShard, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await warm_up(graphed, 64, max_total_tokens=64)
    graphs = graphed.engine.model.graphs
    assert graphs is not None
    assert graphs.inputs is not None
    addresses = [graphs.inputs.input_ids.data_ptr(), graphs.inputs.positions.data_ptr()]
    outputs = [output.data_ptr() for output in recorder.outputs]
    uploaded: list[int] = []
    stage = cuda_graph.stage

    def counting(arrays: list[object], device: torch.device) -> list[Tensor]:
        uploaded.append(len(arrays))
        return stage(arrays, device)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda_graph, "stage", counting)
    driver = ShardDriver(graphed)
    await driver.run(driver.request(1, random_prompt(9), 12), driver.request(2, random_prompt(5), 12))

    # The first step uploads positions and tables; its ids, like all later ones, are on the device already.
    assert uploaded == [2]
    assert recorder.num_replays == 11
    assert [graphs.inputs.input_ids.data_ptr(), graphs.inputs.positions.data_ptr()] == addresses
    assert [output.data_ptr() for output in recorder.outputs] == outputs


async def test_a_step_that_cannot_be_captured_is_computed(
    graphed: LocalShard, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(step: CapturedStep) -> CapturedStep:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorder, "capture", failing)
    await warm_up(graphed, 64, max_total_tokens=64)
    driver = ShardDriver(graphed)

    outcome = (await driver.run(driver.request(1, random_prompt(9), 6)))[0]

    assert len(outcome.ids) == 6
    assert "cannot be captured in a CUDA graph" in caplog.text


async def test_sizes_that_do_not_fit_in_memory_are_left_out(
    graphed: LocalShard, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = recorder.capture

    def short_of_memory(step: CapturedStep) -> CapturedStep:
        if not recorder.outputs:
            recorder.outputs.append(torch.empty(0))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(step)

    monkeypatch.setattr(recorder, "capture", short_of_memory)
    await warm_up(graphed, 64, max_total_tokens=64)

    assert graphed.engine.model.graphs is not None
    assert graphed.engine.model.graphs.sizes == [1, 2]


def test_sizes_follow_the_rows_that_fit() -> None:
    assert graph_sizes(None, 10_000)[:6] == [1, 2, 4, 8, 16, 24]
    assert graph_sizes(None, 10_000)[-3:] == [448, 480, 512]
    assert graph_sizes(None, 3) == [1, 2]
    assert graph_sizes((300, 2, 0), 100) == [2]


def test_requested_graphs_are_refused_on_a_cpu(directory: Path) -> None:
    with pytest.raises(ArgumentError, match=r"`--cuda-graphs 1,2` cannot be served: a cpu device captures no steps"):
        LocalShard.load(tiny_options(directory, cuda_graphs=(1, 2)))
