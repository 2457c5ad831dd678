"""The walk of decoders with layer norms and plain MLPs: GPT-2, BLOOM, OPT, GPT-NeoX, Phi and those built like them.

They differ in what they call their parts, in whether positions are a table, ALiBi or rotary, and in whether attention
and MLP follow each other or stand side by side. `LAYOUTS` says so; a decoder is taken when its modules are exactly
those of a layout, and when its first layer between embedding and last norm gives in the walk what the modules give.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_server.model_server.models.fused_linear import (
    can_stack,
    is_head,
    is_output,
    parted,
    shape_of,
    stacked,
    taken,
)
from reference_server.model_server.models.packed_linear import can_pack
from reference_server.model_server.models.swap import activation_of
from reference_server.model_server.models.walk import (
    ROPE_TYPES,
    FusedLayer,
    Heads,
    RotaryTable,
    Walk,
    known_norm,
    norm_of,
    operators_for,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a decoder calls its parts; names with a dot are of a part's part, and `norm` of a layer may be none.

    positions: a table added to the embedding. rotary: the module whose angles turn queries and keys.
    by_head: one linear gives query, key and value of a head side by side.
    """

    inner: str
    embedding: str
    layers: str
    final_norm: str
    attention: str
    qkv: tuple[str, ...]
    output: str
    input_norm: str
    post_norm: str | None
    up: str
    activation: str
    down: str
    positions: str | None = None
    embedding_norm: str | None = None
    rotary: str | None = None
    by_head: bool = False

    @property
    def inner_parts(self) -> set[str]:
        parts = (self.embedding, self.layers, self.final_norm, self.positions, self.embedding_norm, self.rotary)
        return {part for part in parts if part is not None}

    @property
    def layer_parts(self) -> set[str]:
        """Every module of a layer, by its path."""
        own = {self.input_norm, self.up, self.activation, self.down, self.attention}
        own |= {f"{self.attention}.{part}" for part in (*self.qkv, self.output)}
        own |= {path.rpartition(".")[0] for path in (self.up, self.down) if "." in path}
        return own if self.post_norm is None else own | {self.post_norm}


GPT2 = Layout(
    "transformer", "wte", "h", "ln_f", "attn", ("c_attn",), "c_proj", "ln_1", "ln_2",
    "mlp.c_fc", "mlp.act", "mlp.c_proj", positions="wpe",
)  # fmt: skip
# GPT-BigCode with a K/V head for each query head.
GPT2_BY_HEAD = replace(GPT2, by_head=True)
BLOOM = Layout(
    "transformer", "word_embeddings", "h", "ln_f", "self_attention", ("query_key_value",), "dense",
    "input_layernorm", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.gelu_impl", "mlp.dense_4h_to_h",
    embedding_norm="word_embeddings_layernorm", by_head=True,
)  # fmt: skip
OPT = Layout(
    "model.decoder", "embed_tokens", "layers", "final_layer_norm", "self_attn",
    ("q_proj", "k_proj", "v_proj"), "out_proj", "self_attn_layer_norm", "final_layer_norm",
    "fc1", "activation_fn", "fc2", positions="embed_positions",
)  # fmt: skip
GPT_NEOX = Layout(
    "gpt_neox", "embed_in", "layers", "final_layer_norm", "attention", ("query_key_value",), "dense",
    "input_layernorm", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h",
    rotary="rotary_emb", by_head=True,
)  # fmt: skip
PHI = Layout(
    "model", "embed_tokens", "layers", "final_layernorm", "self_attn", ("q_proj", "k_proj", "v_proj"),
    "dense", "input_layernorm", None, "mlp.fc1", "mlp.activation_fn", "mlp.fc2", rotary="rotary_emb",
)  # fmt: skip
STARCODER2 = Layout(
    "model", "embed_tokens", "layers", "norm", "self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj",
    "input_layernorm", "post_attention_layernorm", "mlp.c_fc", "mlp.act", "mlp.c_proj", rotary="rotary_emb",
)  # fmt: skip
LAYOUTS = (GPT2, GPT2_BY_HEAD, BLOOM, OPT, GPT_NEOX, PHI, STARCODER2)


class PlainDecoder:
    """The walk from token ids to logits of a model in one of the layouts."""

    def __init__(self, model: Any, layout: Layout, keep: bool = False) -> None:
        inner = attrgetter(layout.inner)(model)
        self._embedding = getattr(inner, layout.embedding)
        weight: Tensor = self._embedding.weight.detach()
        self._positions = None if layout.positions is None else getattr(inner, layout.positions)
        self._embedding_norm = (
            None if layout.embedding_norm is None else known_norm(getattr(inner, layout.embedding_norm))
        )
        self._rotary = None if layout.rotary is None else RotaryTable(getattr(inner, layout.rotary), weight)
        self._operators = operators_for(weight)
        layers = list(getattr(inner, layout.layers))
        heads = _heads(layers[0], layout)
        self._walk = Walk([_fuse_layer(layer, layout, heads, keep) for layer in layers], heads, self._operators)
        self._norm = known_norm(getattr(inner, layout.final_norm))
        head = model.get_output_embeddings()
        is_tied = head.weight.data_ptr() == weight.data_ptr()
        self._head = head if keep else taken(head, keep=is_tied)
        self.added_bytes = weight.nbytes if is_tied and can_pack(weight) else 0

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor | None, max_position: int) -> Tensor:
        logits: Tensor = self._head(self.hidden(input_ids, positions, logits_index, max_position))
        return logits

    def hidden(self, input_ids: Tensor, positions: Tensor, kept: Tensor | None, max_position: int) -> Tensor:
        """The normed hidden states that the head reads."""
        hidden = self._embedding(input_ids)
        if self._positions is not None:
            # OPT's table begins two rows late.
            rows = positions + getattr(self._positions, "offset", 0)
            hidden = hidden + F.embedding(rows, self._positions.weight)
        if self._embedding_norm is not None:
            hidden = self._operators.add_norm(hidden, None, self._embedding_norm)
        table = None if self._rotary is None else self._rotary.up_to(max_position)
        return self._walk(hidden, table, positions, kept, self._norm)


def fuse(model: Any) -> PlainDecoder | None:
    """The walk of a model whose attention layers are attached, or None if it has no layout here.

    The walk takes the weights over.
    """
    fitting = [layout for layout in LAYOUTS if _fits(model, layout)]
    for layout in fitting:
        if _first_layer_agrees(model, layout):
            return PlainDecoder(model, layout)
    if fitting:
        logger.warning("%s looks like a decoder that is fused, but computes something else", type(model).__name__)
    return None


def children(module: Any) -> set[str]:
    """Names of a module's own modules, without those that do nothing once a model is trained."""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def stand_in(query: Tensor, key_value: Tensor, *_: object) -> Tensor:
    """Something of query, keys and values that notices when one of them is wrong."""
    group = query.shape[1] // key_value.shape[2]
    key, value = (part.repeat_interleave(group, 1) for part in key_value.unbind(1))
    return torch.tanh(query * key) + value


def _fits(model: Any, layout: Layout) -> bool:
    first, head = layout.inner.partition(".")[0], model.get_output_embeddings()
    if not is_head(head) or [child for name, child in model.named_children() if name != first] != [head]:
        return False
    inner: Any = model
    for name in layout.inner.split("."):
        inner = getattr(inner, name, None)
    if inner is None or children(inner) != layout.inner_parts:
        return False
    if layout.rotary is not None and getattr(getattr(inner, layout.rotary), "rope_type", None) not in ROPE_TYPES:
        return False
    norms = [getattr(inner, name) for name in (layout.final_norm, layout.embedding_norm) if name is not None]
    return all(norm_of(norm) is not None for norm in norms) and all(
        _is_layer(layer, layout) for layer in getattr(inner, layout.layers)
    )


def _is_layer(layer: Any, layout: Layout) -> bool:
    paths = {path for path, module in layer.named_modules() if path and not isinstance(module, nn.Dropout)}
    if paths != layout.layer_parts:
        return False
    attention = getattr(layer, layout.attention)
    inputs = shape_of(attention.get_submodule(layout.output))[1]
    if layout.by_head and shape_of(attention.get_submodule(layout.qkv[0]))[0] != 3 * inputs:
        return False
    norms = [getattr(layer, name) for name in (layout.input_norm, layout.post_norm) if name is not None]
    return (
        can_stack(_projections(attention, layout))
        and can_stack([attrgetter(layout.up)(layer)])
        and is_output(getattr(attention, layout.output))
        and is_output(attrgetter(layout.down)(layer))
        and all(norm_of(norm) is not None for norm in norms)
    )


@torch.no_grad()
def _first_layer_agrees(model: Any, layout: Layout) -> bool:
    """Whether all but the head, of the layers only the first, gives in the walk what the modules give.

    A stand-in takes attention's place in both.
    """
    inner = attrgetter(layout.inner)(model)
    weight = getattr(inner, layout.embedding).weight
    positions = torch.arange(3, device=weight.device)
    input_ids = (positions * 7 + 1) % len(weight)
    with _only_first_layer(inner, layout):
        output = inner(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        expected = output.last_hidden_state[0]
        found = PlainDecoder(model, layout, keep=True).hidden(input_ids, positions, None, 3)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 6e-2
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def _only_first_layer(inner: Any, layout: Layout) -> Iterator[None]:
    layers = getattr(inner, layout.layers)
    attention = getattr(layers[0], layout.attention)
    attached = attention.attached
    attention.attached = stand_in
    setattr(inner, layout.layers, nn.ModuleList([layers[0]]))
    try:
        yield
    finally:
        setattr(inner, layout.layers, layers)
        attention.attached = attached


def _projections(attention: Any, layout: Layout) -> list[Any]:
    return [getattr(attention, name) for name in layout.qkv]


def _heads(layer: Any, layout: Layout) -> Heads:
    attention = getattr(layer, layout.attention)
    head_dim: int = attention.head_size if hasattr(attention, "head_size") else attention.head_dim
    num_heads = shape_of(getattr(attention, layout.output))[1] // head_dim
    rows = sum(shape_of(linear)[0] for linear in _projections(attention, layout))
    return Heads(num_heads, (rows // head_dim - num_heads) // 2, head_dim)


def _fuse_layer(layer: Any, layout: Layout, heads: Heads, keep: bool) -> FusedLayer:
    """The layer's fused form; its modules lose their weights unless told to keep them."""
    attention = getattr(layer, layout.attention)
    projections = _projections(attention, layout)
    qkv = parted(projections[0], heads.num_heads, keep) if layout.by_head else stacked(*projections, keep=keep)
    fused = FusedLayer(
        input_norm=known_norm(getattr(layer, layout.input_norm)),
        qkv=taken(qkv, keep),
        attention=attention.attached,
        output=taken(getattr(attention, layout.output), keep),
        post_norm=None if layout.post_norm is None else known_norm(getattr(layer, layout.post_norm)),
        up=taken(attrgetter(layout.up)(layer), keep),
        down=taken(attrgetter(layout.down)(layer), keep),
        activation=activation_of(attrgetter(layout.activation)(layer)),
        is_gated=False,
        is_parallel=layout.post_norm is None or getattr(layer, "use_parallel_residual", False),
    )
    # OPT scales queries before it asks for attention, which then has a scale of one.
    return replace(fused, query_scale=attention.scaling) if layout is OPT else fused
