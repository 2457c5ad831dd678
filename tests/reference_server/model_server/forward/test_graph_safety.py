"""Whether what a graph captures may be captured, family by family, on a CPU.

A captured step is replayed as it was recorded: it must not wait for its device, and what changes between two steps must
lie at addresses that hold, never in a number or a tensor that the host made for this step.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from reference_server.model_server.attention import backend
from reference_server.model_server.attention.backend import AttentionBackend
from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions
from reference_server.model_server.attention.torch_backend import TorchPrefill
from reference_server.model_server.engine import Engine
from reference_server.model_server.forward.cuda_graph import GraphedForward, StaticInputs, Step
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.models import rotary
from reference_server.model_server.shard import LocalShard
from tests.support.step_recorder import StepRecorder
from tests.support.table_attention import TABLES, TableDecode
from tests.support.tiny_configs import CONFIGS
from tests.support.tiny_models import save_tiny_model
from tests.support.tiny_shards import tiny_options

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

ROWS, BLOCK_SIZE, MAX_TOTAL = 4, 16, 64
# Captured never: its rotary positions depend on each request's length.
OF_LENGTHS = {"llama-dynamic-rope"}
# Transformers' own experts look at which of them are hit. Capturing fails, and every step is launched.
WAITING = {"dbrx"}
SAFE = [name for name in CONFIGS if name not in OF_LENGTHS | WAITING]


class OneKernel(TableDecode):
    """Counts as what a kernel of a GPU is: one launch to store, one to attend."""

    def store(self, key_value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        cache.zero_()

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        return query.clone()


def captured_step(engine: Engine) -> tuple[Step, StaticInputs]:
    """What a graph of ROWS rows would hold, and where it reads its inputs."""
    engine._allocate(32)
    forward = engine._model.forward
    assert isinstance(forward, RaggedForward)
    graphs = GraphedForward(forward, _no_runner, engine.info.block_size)
    static = StaticInputs.empty(ROWS, MAX_TOTAL // BLOCK_SIZE, torch.device("cpu"))
    return graphs._step(static, ROWS, MAX_TOTAL), static


def _no_runner() -> None:
    raise AssertionError("nothing is captured here")


def load(directory: Path, monkeypatch: pytest.MonkeyPatch, attention: AttentionBackend, **options: object) -> Engine:
    monkeypatch.setattr(backend, "BACKENDS", (attention,))
    shard = LocalShard.load(tiny_options(directory, cpu_memory_gib=0.05, **options))
    shard.close()
    return shard._engine


def recorded(step: Step, static: StaticInputs, positions: list[int], first_block: int) -> StepRecorder:
    """One step of rows at `positions`, -1 for an empty one."""
    static.positions.copy_(torch.tensor(positions))
    static.input_ids.copy_(torch.tensor(positions).clamp(min=0) + 3)
    static.block_table.copy_(torch.arange(first_block, first_block + static.block_table.numel()).view(ROWS, -1))
    with StepRecorder() as recorder:
        step()
    assert recorder.calls
    return recorder


def two_steps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StepRecorder, StepRecorder]:
    """The same captured step at other positions, of other rows, in other blocks."""
    with torch.inference_mode():
        step, static = captured_step(load(directory, monkeypatch, TABLES))
        step()
        first = recorded(step, static, [3, 9, -1, -1], first_block=1)
        return first, recorded(step, static, [31, 15, 40, 0], first_block=7)


@pytest.mark.parametrize("family", SAFE)
def test_a_captured_step_waits_for_nothing_and_is_the_same_every_time(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_steps(save_tiny_model(tmp_path, family), monkeypatch)

    assert first.waits == []
    assert first.calls == second.calls


@pytest.mark.parametrize("family", sorted(WAITING))
def test_a_family_that_waits_is_known(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = two_steps(save_tiny_model(tmp_path, family), monkeypatch)

    assert first.waits


@pytest.mark.parametrize("family", sorted(OF_LENGTHS))
def test_rotary_positions_of_a_length_are_never_captured(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(save_tiny_model(tmp_path, family), monkeypatch, TABLES)

    assert rotary.needs_lengths(engine._loaded.model)


def test_the_recorder_sees_waits_and_what_the_host_made() -> None:
    static = torch.tensor([3, 0, 5])
    steps = {
        "item": lambda: static + int(static[0]),
        "nonzero": lambda: static.nonzero(),
        "mask": lambda: static[static > 0],
        "branch": lambda: static + 1 if torch.equal(static, static) else static,
    }
    for name, step in steps.items():
        with StepRecorder() as recorder:
            step()
        assert recorder.waits, name

    calls = []
    for length in (7, 9):
        with StepRecorder() as recorder:
            static + torch.tensor(length)
            static.clamp(max=length)
        calls.append(recorder.calls)
    assert recorder.waits == []
    changed = {one.operator for one, other in zip(*calls, strict=True) if one != other}
    assert {"aten.add.Tensor", "aten.clamp.default"} <= changed


# Kernels of one layer, attention counted as two: a number here may fall, never rise.
KERNELS = {
    "llama": ("num_hidden_layers", 10),
    "qwen3": ("num_hidden_layers", 12),
    "gemma": ("num_hidden_layers", 11),
    "phi3": ("num_hidden_layers", 10),
    "bloom": ("n_layer", 9),
    "gpt2": ("n_layer", 9),
    "opt": ("num_hidden_layers", 10),
    "gpt-neox": ("num_hidden_layers", 11),
    "starcoder2": ("num_hidden_layers", 10),
}


def kernels_of_a_layer(
    family: str, layers: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *, fuse: bool = True
) -> int:
    counts = []
    for number in (2, 3):
        own = directory / str(number)
        own.mkdir()
        save_tiny_model(own, family, **{layers: number})
        with torch.inference_mode():
            one_kernel = AttentionBackend("one", TorchPrefill(), OneKernel())
            step, static = captured_step(load(own, monkeypatch, one_kernel, fuse=fuse))
            counts.append(recorded(step, static, [3, 9, -1, -1], first_block=1).num_kernels)
    return counts[1] - counts[0]


@pytest.mark.parametrize("family", KERNELS)
def test_a_layer_launches_no_more_kernels_than_it_did(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, most = KERNELS[family]

    assert kernels_of_a_layer(family, layers, tmp_path, monkeypatch) <= most


def test_fusing_leaves_less_than_half_of_a_layers_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plain := tmp_path / "plain").mkdir()
    (fused := tmp_path / "fused").mkdir()

    before = kernels_of_a_layer("llama", "num_hidden_layers", plain, monkeypatch, fuse=False)
    after = kernels_of_a_layer("llama", "num_hidden_layers", fused, monkeypatch)

    assert 2 * after < before
