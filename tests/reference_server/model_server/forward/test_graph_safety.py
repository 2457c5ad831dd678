"""Whether a CUDA graph may capture the decode step of each family, checked on a CPU.

A captured step is replayed as it was recorded: it must not wait for its device, and all that changes between two steps
must be at fixed addresses, never a number or a tensor that the host made for one step.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from reference_server.model_server.attention import select
from reference_server.model_server.attention.kernel import AttentionOptions
from reference_server.model_server.attention.select import AttentionBackend
from reference_server.model_server.attention.torch_backend import TorchPrefill
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.engine import Engine
from reference_server.model_server.forward.cuda_graph import CapturedStep, GraphedForward, StaticInputs
from reference_server.model_server.forward.long_rope import RecomputingForward
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.models import rotary
from reference_server.model_server.step_state import Step
from tests.support.models.devices.step_recorder import StepRecorder
from tests.support.models.devices.table_attention import TABLES, TableDecode
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import save_tiny_model
from tests.support.models.tiny_shards import tiny_options

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

ROWS, BLOCK_SIZE, MAX_TOTAL = 4, 16, 64
# Never captured: its rotary positions depend on each request's length.
OF_LENGTHS = {"llama-dynamic-rope"}
# Transformers' own experts read on the host which of them are used. Capture fails, and every step is computed.
WAITING = {"dbrx"}
SAFE = [name for name in CONFIGS if name not in OF_LENGTHS | WAITING]
# One of each kind: rotary positions plain, scaled and by length, learned ones and ALiBi, windows above and in turn,
# experts, latent attention, packed, interleaved and shared projections, serial and parallel layers, late norms.
SHORT = {
    *("llama", "llama-yarn-rope", "phi3-longrope", "mistral-window", "mixtral", "qwen2-moe-window", "gemma3", "gpt2"),
    *("gptj", "gpt-bigcode", "opt-post-norm", "mpt", "falcon-groups", "bloom", "cohere2", "olmo2", "deepseek-v3"),
}


class OneKernel(TableDecode):
    """One launch, as a kernel of a GPU."""

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        return query.clone()


class OneStore:
    """One launch."""

    def __call__(self, key_value: Tensor, cache: LayerCache, step: Step) -> None:
        cache.buffer.zero_()


def captured_step(engine: Engine) -> tuple[CapturedStep, StaticInputs]:
    """The step that a graph of ROWS rows captures, and its inputs."""
    engine.allocate_cache(32)
    forward = engine.model.forward
    if isinstance(forward, RecomputingForward):
        forward = forward.forward
    assert isinstance(forward, RaggedForward)
    graphs = GraphedForward(forward, _no_runner, engine.info.block_size)
    static = StaticInputs.empty(ROWS, MAX_TOTAL // BLOCK_SIZE, torch.device("cpu"))
    return graphs.make_step(static, ROWS, MAX_TOTAL), static


def _no_runner() -> None:
    raise AssertionError("nothing is captured here")


def load(directory: Path, monkeypatch: pytest.MonkeyPatch, attention: AttentionBackend, **options: object) -> Engine:
    monkeypatch.setattr(select, "BACKENDS", (attention,))
    shard = LocalShard.load(tiny_options(directory, cpu_memory_gib=0.05, **options))
    shard.close()
    return shard.engine


def recorded(step: CapturedStep, static: StaticInputs, positions: list[int], first_block: int) -> StepRecorder:
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


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in SAFE]
)
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
def test_length_dependent_rotary_positions_are_never_captured(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(save_tiny_model(tmp_path, family), monkeypatch, TABLES)

    assert rotary.needs_lengths(engine.loaded.model)


def test_the_recorder_finds_waits_and_values_made_on_the_host() -> None:
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
            one_kernel = AttentionBackend("one", TorchPrefill, OneKernel, OneStore)
            step, static = captured_step(load(own, monkeypatch, one_kernel, fuse=fuse))
            counts.append(recorded(step, static, [3, 9, -1, -1], first_block=1).num_kernels)
    return counts[1] - counts[0]


@pytest.mark.parametrize("family", KERNELS)
def test_a_layer_launches_no_more_kernels_than_it_did(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, most = KERNELS[family]

    assert kernels_of_a_layer(family, layers, tmp_path, monkeypatch) <= most


def test_fusing_removes_more_than_half_of_a_layers_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plain := tmp_path / "plain").mkdir()
    (fused := tmp_path / "fused").mkdir()

    before = kernels_of_a_layer("llama", "num_hidden_layers", plain, monkeypatch, fuse=False)
    after = kernels_of_a_layer("llama", "num_hidden_layers", fused, monkeypatch)

    assert 2 * after < before
