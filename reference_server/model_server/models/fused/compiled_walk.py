"""A decoder's layers as the table of the compiled walk (cpu_kernels/walk.cpp): one operator for a decode step.

`Walk` is its reference, and computes all steps that are not one token a row. A decoder that the table cannot describe
has no compiled walk, for a reason that the shard logs.
"""

import functools
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.attention.kernel import AttentionOptions
from reference_server.model_server.attention.paged import PagedLayer
from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.memory.kv_cache import KVCache
from reference_server.model_server.models.adapters.products import CompiledProduct
from reference_server.model_server.models.adapters.site import AdapterProduct
from reference_server.model_server.models.fused.operators import Norm
from reference_server.model_server.models.fused.packed_linear import panels_of
from reference_server.model_server.models.fused.walk import Activation, FusedLayer, Heads, Linear
from reference_server.model_server.quantization.integers import IntegerProduct
from reference_server.model_server.quantization.packed_float8 import PackedFloat8
from reference_server.model_server.quantization.packed_product import PackedProduct, PackedProductLinear

# The structures of kernels.h and walk.cpp; every field has eight bytes.
NORM = np.dtype([("weight", "i8"), ("bias", "i8"), ("epsilon", "f8"), ("centered", "i8")])
PRODUCT = np.dtype(
    [(name, "i8") for name in ("packed", "bias", "inputs", "outputs")]
    + [(name, "i8") for name in ("multipliers", "scales", "zeros", "groups", "group", "bits")]
)
GEOMETRY = np.dtype(
    [(name, "i8") for name in ("num_heads", "num_kv_heads", "block_size", "head_dim", "window")]
    + [("scaling", "f8"), ("softcap", "f8"), ("slopes", "i8")]
)
# kFloat8Bits of kernels.h.
FLOAT8_BITS = -8
NORMS = ("input_norm", "post_norm", "query_norm", "key_norm", "attended_norm", "mlp_norm")
PRODUCTS = ("qkv", "output", "up", "down")
LAYER = np.dtype(
    [(name, NORM) for name in NORMS]
    + [(name, PRODUCT) for name in PRODUCTS]
    + [("geometry", GEOMETRY), ("cache", "i8"), ("cache_type", "i8")]
    + [(name, "f8") for name in ("key_factor", "value_factor", "value_scale", "multiplier", "query_scale")]
    + [(name, "i8") for name in ("activation", "is_gated", "is_parallel")]
)
END = np.dtype([("norm", NORM), ("head", PRODUCT)])

# In the order of `CacheType` in walk.cpp.
CACHE_TYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
# In the order of `Activation` in kernels.h.
ACTIVATIONS: tuple[Activation, ...] = (F.silu, functools.partial(F.gelu, approximate="tanh"), F.gelu, F.relu)


class Undescribed(Exception):
    """A decoder that the table cannot describe."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CompiledWalk:
    """The decode steps of one decoder."""

    def __init__(
        self,
        layers: Sequence[FusedLayer],
        heads: Heads,
        norm: Norm,
        head: Linear,
        adapters: AdapterProduct | None = None,
    ) -> None:
        """adapters: the product that adapters use; its sites are the products of the layers. Raises Undescribed."""
        kernels = build.kernels()
        if kernels is None or not hasattr(kernels, "walk"):
            raise Undescribed("there is no compiled bfloat16 product")
        self._operator = kernels.walk.default
        # The table contains addresses, so the objects at them must live as long as the table.
        self._kept: list[object] = [layers, norm, head]
        self._adapters = adapters if isinstance(adapters, CompiledProduct) else None
        self._attention = [_paged(layer) for layer in layers]
        self._state = self._attention[0].state
        self._layers = np.zeros(len(layers), LAYER)
        for row, layer, attention in zip(self._layers, layers, self._attention, strict=True):
            _describe(row, layer, heads, attention.options)
        end = np.zeros(1, END)
        end[0]["norm"] = _norm(norm)
        product = _product(head)
        self.has_head = product is not None
        """Whether the result is the logits; else it is the normed hidden states."""
        if product is not None:
            end[0]["head"] = product
        self._end = _bytes(end)
        # A cache that the engine replaces must be freed before the next one is allocated.
        self._cache: Callable[[], KVCache | None] = lambda: None
        self._table: Tensor

    def takes_step(self) -> bool:
        """Whether every row of the step in progress computes one token, with compiled adapters if with any."""
        step = self._state.step
        if step is None or (step.adapters is not None and self._adapters is None):
            return False
        return step.metadata.num_single_rows == step.metadata.num_rows

    def __call__(self, hidden: Tensor, rotary: Tensor | None, positions: Tensor, kept: Tensor | None = None) -> Tensor:
        """[rows, vocab_size], or [rows, size] without a head. hidden: [rows, size], overwritten.

        kept: [rows, size], receives the input of the head.
        """
        step = self._state.step
        assert step is not None, "a decode step outside a step"
        cache = self._state.cache
        assert cache is not None, "attention before the cache is allocated"
        if cache is not self._cache():
            self._attach(cache)
        tensors = step.tensors
        factors = groups = None
        if self._adapters is not None and step.adapters is not None:
            factors, groups = self._adapters.table, torch.from_numpy(step.adapters.rows.packed)
        result: Tensor = self._operator(
            *(hidden, self._table, self._end, rotary, positions),
            *(tensors.slots, tensors.block_table, tensors.seqlen_k, kept, factors, groups),
        )
        return result

    def _attach(self, cache: KVCache) -> None:
        """Write the addresses of a new cache."""
        for row, attention in zip(self._layers, self._attention, strict=True):
            layer = cache.layers[attention.index]
            assert layer.buffer.is_contiguous(), "the cache of a layer is one piece"
            row["cache"], row["cache_type"] = layer.buffer.data_ptr(), CACHE_TYPES.index(layer.buffer.dtype)
            row["key_factor"], row["value_factor"] = layer.factors
            row["value_scale"] = layer.scales.value
            row["geometry"]["block_size"] = layer.block_size
            row["geometry"]["scaling"] = attention.options.scaling * layer.scales.key
        self._cache, self._table = weakref.ref(cache), _bytes(self._layers)


def _paged(layer: FusedLayer) -> PagedLayer:
    """The layer's attention, if its decode kernel is the compiled one."""
    attention = layer.attention
    if not isinstance(attention, PagedLayer):
        raise Undescribed("its attention is not paged")
    if attention.choice.decode.name != "compiled":
        raise Undescribed(f"its attention is {attention.choice.decode.name}")
    return attention


def _describe(row: np.void, layer: FusedLayer, heads: Heads, options: AttentionOptions) -> None:
    for name in PRODUCTS:
        product = _product(getattr(layer, name))
        if product is None:
            raise Undescribed("a product of its layers is not packed by the compiled kernel")
        row[name] = product
    for name in NORMS:
        norm = getattr(layer, name)
        if norm is not None:
            row[name] = _norm(norm)
    if layer.is_parallel and layer.attended_norm is not None:
        raise Undescribed("its parallel layers norm the result of attention")
    slopes = options.alibi_slopes
    if slopes is not None and (slopes.dtype != torch.float32 or not slopes.is_contiguous()):
        raise Undescribed("its ALiBi slopes are not float32")
    row["geometry"] = (
        *(heads.num_heads, heads.num_kv_heads, 0, heads.head_dim, options.window or 0),
        *(options.scaling, options.softcap or 0.0, _address(slopes)),
    )
    row["multiplier"], row["query_scale"] = layer.multiplier, layer.query_scale
    row["activation"] = _activation(layer.activation)
    row["is_gated"], row["is_parallel"] = layer.is_gated, layer.is_parallel


def _norm(norm: Norm) -> tuple[int, int, float, int]:
    tensors = [tensor for tensor in (norm.weight, norm.bias) if tensor is not None]
    if any(tensor.dtype != torch.bfloat16 or not tensor.is_contiguous() for tensor in tensors):
        raise Undescribed("a norm of its layers is not in bfloat16")
    return _address(norm.weight), _address(norm.bias), norm.epsilon, int(norm.centered)


def _product(linear: Linear) -> tuple[int, ...] | None:
    """A row of PRODUCT; None if the compiled kernels do not have the linear."""
    owner = getattr(linear, "__self__", None)
    if isinstance(owner, PackedProductLinear):
        return _packed(owner.product, _bias(owner.bias))
    panels = panels_of(linear)
    if panels is None:
        return None
    return _address(panels.packed), _bias(panels.bias), panels.inputs, panels.outputs, 0, 0, 0, 0, 0, 0


def _packed(product: PackedProduct, bias: int) -> tuple[int, ...] | None:
    weight, (outputs, inputs) = product.weight, product.weight.shape
    if isinstance(weight, PackedFloat8):
        factors = (_address(weight.factors), 0, 0, weight.factors.shape[1], weight.group, FLOAT8_BITS)
        return _address(weight.codes), bias, inputs, outputs, *factors
    if isinstance(product, IntegerProduct) and product.order is not None:
        return None
    groups, quads = weight.codes.shape[1:3]
    addresses = [_address(part) for part in (weight.multipliers, weight.scales, weight.zeros)]
    return _address(weight.codes), bias, inputs, outputs, *addresses, groups, 4 * quads, weight.bits


def _bias(bias: Tensor | None) -> int:
    if bias is not None and (bias.dtype != torch.bfloat16 or not bias.is_contiguous()):
        raise Undescribed("a bias of its layers is not in bfloat16")
    return _address(bias)


def _activation(activation: Activation | None) -> int:
    if activation is None:
        return 0
    sample = torch.linspace(-6.0, 6.0, 97)
    found = activation(sample)
    for number, known in enumerate(ACTIVATIONS):
        if torch.allclose(found, known(sample), rtol=1e-5, atol=1e-6):
            return number
    raise Undescribed("the walk does not have its activation")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _bytes(records: NDArray[np.void]) -> Tensor:
    return torch.from_numpy(records.view(np.uint8))
