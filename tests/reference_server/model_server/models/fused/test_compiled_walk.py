"""The compiled walk against the walk operator by operator, for every structure that its table describes."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.memory.kv_cache import UNSCALED, KVCache, KVScales
from reference_server.model_server.models.fused import fuse
from reference_server.model_server.models.fused.compiled_walk import Undescribed
from reference_server.model_server.models.fused.fuse import FusedDecoder
from reference_server.model_server.quantization.fp8 import round_to_float8
from reference_server.model_server.quantization.int4 import GroupedIntegers
from reference_server.model_server.quantization.int8 import round_to_int8
from reference_server.model_server.quantization.linear import Product, QuantizedLinear
from reference_server.model_server.step_state import IntArray, Step, StepMetadata, StepState, StepTensors
from tests.support.models.attached import attach
from tests.support.models.tiny_models import make_tiny_model

BF16 = torch.bfloat16
BLOCK_SIZE, NUM_BLOCKS, MOST_KEYS = 16, 260, 60
multiplies = pytest.mark.skipif(not hasattr(build.kernels(), "walk"), reason="this processor has no bfloat16 product")
multiplies_float8 = pytest.mark.skipif(
    not hasattr(build.kernels(), "float8_linear"), reason="this processor has no product of eight-bit floats"
)

# Gated by a silu: both walks run the same kernels.
EXACT = (
    "llama", "llama-tied-llama3-rope", "qwen2", "mistral-window", "llama-linear-rope", "llama-yarn-rope", "qwen3",
    "phi3", "granite", "stablelm",
)  # fmt: skip
# Their activation is torch's in one walk and the kernels' in the other; the two may round differently.
CLOSE = (
    "gemma", "gemma2", "gpt2", "gpt-bigcode", "gpt-bigcode-many-heads", "gpt2-scaled-by-layer", "bloom",
    "bloom-6-heads", "opt", "gpt-neox", "gpt-neox-serial", "phi", "starcoder2",
)  # fmt: skip


@multiplies
@torch.no_grad()
@pytest.mark.parametrize("sizes", [(1, 13), pytest.param((2, 3, 5, 12, 33, 64), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_a_decode_step_equals_the_one_operator_by_operator(name: str, sizes: tuple[int, ...]) -> None:
    plain, plain_state = decoder_of(name)
    compiled, state = decoder_of(name)
    compiled.compile_walk()
    tolerance = 0 if name in EXACT else 0.06
    for rows in sizes:
        # Two steps, of which the second reads what the first has stored.
        lengths = ragged_lengths(rows)
        found, expected = [], []
        for step in (decode_step(lengths), decode_step(lengths + 1)):
            tokens = torch.arange(rows) * 7 % 90 + step.metadata.max_k
            positions = torch.from_numpy(step.metadata.seqlen_k - 1)
            for decoder, own, results in ((plain, plain_state, expected), (compiled, state, found)):
                with own.use(step):
                    results.append(decoder(tokens % 100, positions, None, step.metadata.max_k - 1))

        torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=tolerance, rtol=tolerance)
        for cache, other in zip(layers_of(state), layers_of(plain_state), strict=True):
            torch.testing.assert_close(cache, other, atol=tolerance, rtol=tolerance)


# Weights of eight bits with a scale per output, and of four in groups: bias and tied or plain heads.
@multiplies
@torch.no_grad()
@pytest.mark.parametrize("weights", ["int4", "int8", pytest.param("fp8", marks=multiplies_float8)])
@pytest.mark.parametrize("name", ["llama", "qwen2", "llama-tied-llama3-rope"])
def test_a_quantized_decode_step_equals_the_one_operator_by_operator(name: str, weights: str) -> None:
    plain, plain_state = decoder_of(name, weights)
    compiled, state = decoder_of(name, weights)
    compiled.compile_walk()

    for rows in (1, 3, 8, 13):
        step = decode_step(ragged_lengths(rows))
        assert torch.equal(run(compiled, state, step), run(plain, plain_state, step))


@multiplies
@torch.no_grad()
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scales", [UNSCALED, KVScales(0.21, 1.3)])
def test_a_decode_step_over_eight_bit_keys_equals_the_one_operator_by_operator(
    stored: torch.dtype, scales: KVScales
) -> None:
    results, caches = [], []
    for is_compiled in (False, True):
        decoder, state = decoder_of("llama")
        state.cache = new_cache(state, seed=1, stored=stored, scales=scales)
        if is_compiled:
            decoder.compile_walk()
        lengths = ragged_lengths(5)
        results.append([run(decoder, state, decode_step(lengths + added)) for added in (0, 1)])
        caches.append(layers_of(state))

    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
    for cache, other in zip(*caches, strict=True):
        assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))


class Calls(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))


@multiplies
@torch.no_grad()
def test_a_decode_step_is_one_compiled_operator() -> None:
    decoder, state = decoder_of("llama")
    decoder.compile_walk()

    with Calls() as calls:
        run(decoder, state, decode_step(np.array([20, 3])))

    assert [name for name in calls.names if "reference_server_cpu" in name] == ["reference_server_cpu::walk"]
    assert "aten::linear" not in calls.names


@multiplies
@torch.no_grad()
def test_the_walk_follows_a_new_cache() -> None:
    decoder, state = decoder_of("llama")
    decoder.compile_walk()
    step = decode_step(np.array([20, 3]))
    first = run(decoder, state, step)

    with_keys, state.cache = state.cache, new_cache(state, seed=9)
    other = run(decoder, state, step)
    state.cache = with_keys
    again = run(decoder, state, step)

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@multiplies
@torch.no_grad()
def test_the_walk_does_not_keep_a_replaced_cache() -> None:
    decoder, state = decoder_of("llama")
    decoder.compile_walk()
    run(decoder, state, decode_step(np.array([20, 3])))
    assert state.cache is not None
    replaced = weakref.ref(state.cache)

    state.cache = None

    assert replaced() is None
    with pytest.raises(AssertionError, match="before the cache is allocated"):
        run(decoder, state, decode_step(np.array([20, 3])))


@multiplies
@torch.no_grad()
def test_a_prompt_is_computed_operator_by_operator() -> None:
    plain, plain_state = decoder_of("llama")
    compiled, state = decoder_of("llama")
    compiled.compile_walk()
    metadata = StepMetadata(
        slots=np.arange(16, 28),
        block_table=np.array([[1]]),
        seqlen_q=np.array([12]),
        seqlen_k=np.array([12]),
        num_single_rows=0,
    )
    prompt = Step(metadata, StepTensors.of_host(metadata))

    results = []
    for decoder, own in ((plain, plain_state), (compiled, state)):
        with own.use(prompt):
            results.append(decoder(torch.arange(12), torch.arange(12), torch.tensor([11]), 11))

    assert torch.equal(results[0], results[1])


@multiplies
def test_float32_has_no_compiled_walk() -> None:
    model = make_tiny_model("llama")
    attach(model, torch.float32)
    decoder = fused(model)

    with pytest.raises(Undescribed) as refused:
        decoder.compile_walk()

    assert str(refused.value) == "a product of its layers is not packed by the compiled kernel"


@multiplies
def test_an_unknown_activation_has_no_compiled_walk() -> None:
    model = make_tiny_model("llama").to(BF16)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()
    attach(model, BF16)

    with pytest.raises(Undescribed) as refused:
        fused(model).compile_walk()

    assert str(refused.value) == "the walk does not have its activation"


def decoder_of(name: str, weights: str = "bfloat16") -> tuple[FusedDecoder, StepState]:
    """The model in bfloat16 over a cache of random keys and values, the same on every call."""
    # Stacked products need whole panels of 32 outputs.
    sizes = {} if weights == "bfloat16" else {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    model = make_tiny_model(name, **sizes).to(BF16)
    if weights != "bfloat16":
        quantize(model, weights)
    state = attach(model, BF16, NUM_BLOCKS)
    decoder = fused(model)
    state.cache = new_cache(state, seed=1)
    return decoder, state


def rounded(weight: torch.Tensor, weights: str) -> Product:
    """Eight bits with a scale per output, four in groups of 16 inputs around the middle code."""
    if weights == "int8":
        return round_to_int8(weight)
    if weights == "fp8":
        return round_to_float8(weight)
    scales = weight.float().unflatten(1, (-1, 16)).abs().amax(2) / 7
    codes = (weight / scales.repeat_interleave(16, 1)).round() + 8
    group_of = torch.arange(weight.shape[1]) // 16
    whole = GroupedIntegers(codes.to(torch.uint8), scales, torch.full_like(scales, 8), group_of, 4)
    return whole.product(BF16, weight.device)


def quantize(model: PreTrainedModel, weights: str) -> None:
    """Round the layers' linears."""
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            weight, linear = module.weight.detach(), QuantizedLinear(module, tuple(module.weight.shape), sums=False)
            linear.load(rounded(weight, weights), BF16, weight.device)
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, linear)


def fused(model: PreTrainedModel) -> FusedDecoder:
    decoder = fuse.fuse(model)
    assert decoder is not None
    return decoder


def new_cache(state: StepState, seed: int, stored: torch.dtype = BF16, scales: KVScales = UNSCALED) -> KVCache:
    assert state.cache is not None
    shapes = [layer.shape for layer in state.cache.layers]
    cache = KVCache(shapes, NUM_BLOCKS, BLOCK_SIZE, stored, torch.device("cpu"), [scales] * len(shapes))
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        layer.buffer.copy_(torch.randn(layer.buffer.shape, generator=generator))
    return cache


def layers_of(state: StepState) -> list[torch.Tensor]:
    assert state.cache is not None
    return [layer.buffer for layer in state.cache.layers]


def run(decoder: FusedDecoder, state: StepState, step: Step) -> torch.Tensor:
    positions = torch.from_numpy(step.metadata.seqlen_k - 1)
    with state.use(step):
        return decoder(torch.arange(len(positions)), positions, None, step.metadata.max_k - 1)


def ragged_lengths(rows: int) -> IntArray:
    return np.random.default_rng(rows).integers(1, MOST_KEYS, rows)


def decode_step(lengths: IntArray) -> Step:
    """Rows of these lengths. Rows of more than 17 keys share their first block, as those of a common prefix do."""
    rows, blocks = len(lengths), -(-(MOST_KEYS + 1) // BLOCK_SIZE)
    table = 2 + np.arange(rows * blocks, dtype=np.int64).reshape(rows, blocks)
    table[lengths > BLOCK_SIZE + 1, 0] = 1
    last = lengths - 1
    metadata = StepMetadata(
        slots=table[np.arange(len(lengths)), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE,
        block_table=table,
        seqlen_q=np.ones(len(lengths), dtype=np.int64),
        seqlen_k=lengths,
        num_single_rows=len(lengths),
    )
    return Step(metadata, StepTensors.of_host(metadata))
