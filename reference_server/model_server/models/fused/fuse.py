"""Runs a loaded decoder with fewer operators, if its structure is one of `LAYOUTS`.

A decoder is recognised by its modules, not by its family's name: pre-norm layers, separate or packed projections,
half-split rotary positions, ALiBi or a position table, a gated or a plain MLP, a plain output head. Projections of the
same input become one product, and `Walk` runs the layers. Before the modules lose their weights, the first layer is run
both ways: if the results differ, or the structure is unknown, the model keeps Transformers' modules.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_server.model_server.memory.free_memory import return_free_memory
from reference_server.model_server.models.adapters.site import AdapterProduct, Sites, adapted
from reference_server.model_server.models.fused.compiled_walk import CompiledWalk
from reference_server.model_server.models.fused.fused_linear import (
    can_stack,
    heads_in_order,
    is_head,
    is_output,
    place_weight,
    shape_of,
    split_heads,
    stacked,
    take_weights,
)
from reference_server.model_server.models.fused.layouts import LAYOUTS, OPT, Layout
from reference_server.model_server.models.fused.operators import Norm, known_norm, norm_of, operators_for
from reference_server.model_server.models.fused.packed_linear import can_pack
from reference_server.model_server.models.fused.swap import activation_of
from reference_server.model_server.models.fused.walk import ROPE_TYPES, Activation, FusedLayer, Heads, RotaryTable, Walk
from reference_server.model_server.speculation.hidden_states import HiddenStates

logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """Computes logits of packed tokens: from their ids, or in two steps so that the embeddings can be replaced."""

    def __call__(
        self, input_ids: Tensor, positions: Tensor, logits_index: Tensor | None, max_position: int, /
    ) -> Tensor: ...

    def embed(self, input_ids: Tensor, /) -> Tensor:
        """[tokens, hidden], a new tensor."""
        ...

    def logits(self, inputs_embeds: Tensor, positions: Tensor, index: Tensor | None, max_position: int, /) -> Tensor:
        """The logits of the tokens `index`, all if None. inputs_embeds: overwritten."""
        ...


MULTIPLIERS = {"residual_multiplier", "embedding_multiplier"}


class FusedDecoder:
    """A recognised decoder: from token ids to logits, or from their embeddings to logits."""

    def __init__(self, model: Any, layout: Layout, keep: bool = False) -> None:
        """The modules lose their weights unless `keep`."""
        inner = attrgetter(layout.inner)(model)
        self._embedding: Any = getattr(inner, layout.embedding)
        weight: Tensor = self._embedding.weight.detach()
        # The module's own call takes as long as the operator.
        self._table = weight if _is_plain_embedding(self._embedding) else None
        self._multiplier: float = getattr(inner, "embedding_multiplier", 1.0)
        self._positions = None if layout.positions is None else getattr(inner, layout.positions)
        self._embedding_norm = _norm(inner, layout.embedding_norm)
        self._rotary = None if layout.rotary is None else RotaryTable(getattr(inner, layout.rotary), weight)
        self._operators = operators_for(weight)
        layers = list(getattr(inner, layout.layers))
        heads = _heads(layers[0], layout)
        self._fused: list[FusedLayer] = []
        for layer in layers:
            fused = _fuse_layer(layer, layout, heads, keep)
            for linear in (fused.qkv, fused.output, fused.up, fused.down) if not keep else ():
                place_weight(linear)
            self._fused.append(fused)
            return_free_memory()
        self._heads = heads
        self._layout = layout
        self._adapters: AdapterProduct | None = None
        self._walk = Walk(self._fused, heads, self._operators)
        self._compiled: CompiledWalk | None = None
        self.kept: HiddenStates | None = None
        """Receives the input of the head, if it is set."""
        self._norm = known_norm(getattr(inner, layout.final_norm))
        head = model.get_output_embeddings()
        is_tied = head.weight.data_ptr() == weight.data_ptr()
        self.head = head if keep else take_weights(head, keep=is_tied)
        """[rows, hidden] -> [rows, vocab_size], before the logits are scaled."""
        if not keep:
            place_weight(self.head)
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._divisor: float = getattr(model.config, "logits_scaling", 1.0)
        self.added_bytes = weight.nbytes if is_tied and can_pack(weight) else 0

    def adapt(self, sites: Sites) -> None:
        """Let adapters add to the products of the layers. The sites are those of the compiled walk, in its order."""
        self._adapters = sites.product
        layout, inner = self._layout, f"{self._layout.inner}.{self._layout.layers}"
        last = len(self._fused) - 1
        order = functools.partial(heads_in_order, self._heads.num_heads) if layout.by_head else None
        adapted_layers = []
        for number, layer in enumerate(self._fused):
            names, is_last = f"{inner}.{number}", number == last
            attention = f"{names}.{layout.attention}"
            qkv = sites.at([f"{attention}.{name}" for name in layout.qkv], order=order)
            output = sites.at([f"{attention}.{layout.output}"], is_kept=is_last)
            up = sites.at([f"{names}.{name}" for name in layout.up], is_kept=is_last)
            down = sites.at([f"{names}.{layout.down}"], is_kept=is_last)
            adapted_layers.append(
                replace(
                    layer,
                    qkv=adapted(layer.qkv, qkv),
                    output=adapted(layer.output, output),
                    up=adapted(layer.up, up),
                    down=adapted(layer.down, down),
                )
            )
        self._walk = Walk(adapted_layers, self._heads, self._operators)

    def compile_walk(self) -> None:
        """Compute decode steps with one operator from here on; raises Undescribed if it cannot."""
        self._compiled = CompiledWalk(self._fused, self._heads, self._norm, self.head, self._adapters)

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor | None, max_position: int) -> Tensor:
        return self.logits(self.embed(input_ids), positions, logits_index, max_position)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids -> [tokens, hidden], the `inputs_embeds` of `logits`."""
        embedded: Tensor = self._embedding(input_ids) if self._table is None else F.embedding(input_ids, self._table)
        return embedded

    def logits(self, inputs_embeds: Tensor, positions: Tensor, index: Tensor | None, max_position: int) -> Tensor:
        """The logits of the tokens `index`, all if None. inputs_embeds: [tokens, hidden], overwritten."""
        logits = self._decode(inputs_embeds, positions, index, max_position)
        if logits is None:
            hidden = self.hidden(inputs_embeds, positions, index, max_position, self._norm)
            if self.kept is not None:
                self.kept.rows = hidden
            logits = self.head(hidden)
        if self._divisor != 1:
            logits = logits / self._divisor
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def hidden(
        self, inputs_embeds: Tensor, positions: Tensor, index: Tensor | None, max_position: int, final_norm: Norm
    ) -> Tensor:
        """The hidden states before the head, normed by `final_norm`."""
        hidden, table = self._first_hidden(inputs_embeds, positions), self._rotary_table(max_position)
        return self._walk(hidden, table, positions, index, final_norm)

    def _decode(
        self, inputs_embeds: Tensor, positions: Tensor, index: Tensor | None, max_position: int
    ) -> Tensor | None:
        """The head's result for one token a row in one operator, or None if that cannot compute this step."""
        if self._compiled is None or index is not None or not self._compiled.takes_step():
            return None
        hidden, table = self._first_hidden(inputs_embeds, positions), self._rotary_table(max_position)
        if self.kept is None or not self.kept.is_read:
            result = self._compiled(hidden, table, positions)
            return result if self._compiled.has_head else self.head(result)
        self.kept.rows = torch.empty_like(hidden) if self._compiled.has_head else None
        result = self._compiled(hidden, table, positions, self.kept.rows)
        if self._compiled.has_head:
            return result
        self.kept.rows = result
        return self.head(result)

    def _first_hidden(self, inputs_embeds: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer."""
        hidden = inputs_embeds if self._multiplier == 1 else inputs_embeds * self._multiplier
        if self._positions is not None:
            # OPT's table begins two rows late.
            rows = positions + getattr(self._positions, "offset", 0)
            hidden = hidden + F.embedding(rows, self._positions.weight)
        if self._embedding_norm is not None:
            hidden = self._operators.add_norm(hidden, None, self._embedding_norm)
        return hidden

    def _rotary_table(self, max_position: int) -> Tensor | None:
        return None if self._rotary is None else self._rotary.up_to(max_position)


def _is_plain_embedding(module: nn.Module) -> bool:
    """Whether a call only selects rows of the weight."""
    return type(module) is nn.Embedding and module.max_norm is None and not module._forward_hooks


def fuse(model: Any) -> FusedDecoder | None:
    """The fused form of a model whose attention layers are attached, or None if it has none of the layouts.

    The modules lose their weights, so that no weight is stored twice.
    """
    layouts = [layout for layout in LAYOUTS if _fits(model, layout)]
    for layout in layouts:
        if _first_layer_agrees(model, layout):
            return FusedDecoder(model, layout)
    if layouts:
        logger.warning("%s has the modules of a known decoder but computes something else", type(model).__name__)
    return None


def _fits(model: Any, layout: Layout) -> bool:
    """Whether every module is one that the walk reproduces."""
    first, head = layout.inner.partition(".")[0], model.get_output_embeddings()
    if not is_head(head) or [child for name, child in model.named_children() if name != first] != [head]:
        return False
    inner: Any = model
    for name in layout.inner.split("."):
        inner = getattr(inner, name, None)
    if inner is None or _children(inner) != layout.inner_parts or _has_unknown_multiplier(inner, layout):
        return False
    if layout.rotary is not None and getattr(getattr(inner, layout.rotary), "rope_type", None) not in ROPE_TYPES:
        return False
    norms = [getattr(inner, name) for name in (layout.final_norm, layout.embedding_norm) if name is not None]
    return all(norm_of(norm) is not None for norm in norms) and all(
        _is_layer(layer, layout) for layer in getattr(inner, layout.layers)
    )


def _children(module: Any) -> set[str]:
    """Names of a module's children, without dropout, which does nothing in inference."""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def _has_unknown_multiplier(module: Any, layout: Layout) -> bool:
    """Whether the module has a number, unknown to the walk, that may scale its activations."""
    if not layout.is_gated:
        return False
    return any(isinstance(value, float) and name not in MULTIPLIERS for name, value in vars(module).items())


def _is_layer(layer: Any, layout: Layout) -> bool:
    paths = {path for path, module in layer.named_modules() if path and not isinstance(module, nn.Dropout)}
    if paths != layout.layer_parts or _has_unknown_multiplier(layer, layout):
        return False
    attention = getattr(layer, layout.attention)
    inputs = shape_of(attention.get_submodule(layout.output))[1]
    if layout.by_head and shape_of(attention.get_submodule(layout.qkv[0]))[0] != 3 * inputs:
        return False
    head_norms = [norm_of(getattr(attention, name)) for name in layout.head_norms]
    return (
        can_stack(_projections(attention, layout))
        and can_stack(_ups(layer, layout))
        and is_output(getattr(attention, layout.output))
        and is_output(attrgetter(layout.down)(layer))
        and all(norm_of(getattr(layer, name)) is not None for name in layout.layer_norms)
        # OLMo 2's are over all heads together.
        and all(norm and not norm.centered and len(norm.weight) == attention.head_dim for norm in head_norms)
    )


@torch.no_grad()
def _first_layer_agrees(model: Any, layout: Layout) -> bool:
    """Whether the walk and the modules agree on the results of the embedding and the first layer, without attention."""
    inner = attrgetter(layout.inner)(model)
    weight = getattr(inner, layout.embedding).weight
    positions = torch.arange(3, device=weight.device)
    input_ids = (positions * 7 + 1) % len(weight)
    with _first_layer_only(inner, layout) as outputs:
        inner(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        decoder = FusedDecoder(model, layout, keep=True)
        # Compared through a plain norm, as the weights of the final one may be of any size.
        norm = Norm(torch.ones_like(outputs[0][0, 0]), 1e-6)
        found = decoder.hidden(decoder.embed(input_ids), positions, None, 3, norm)
    expected = operators_for(weight).add_norm(outputs[0][0].contiguous(), None, norm)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 6e-2
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def _first_layer_only(inner: Any, layout: Layout) -> Iterator[list[Tensor]]:
    """The model with one layer and `stand_in` for its attention; gives the inputs of its final norm."""
    layers, outputs = getattr(inner, layout.layers), []
    attention = getattr(layers[0], layout.attention)
    attached = attention.attached
    hook = getattr(inner, layout.final_norm).register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    attention.attached = stand_in
    setattr(inner, layout.layers, nn.ModuleList([layers[0]]))
    try:
        yield outputs
    finally:
        hook.remove()
        setattr(inner, layout.layers, layers)
        attention.attached = attached


def stand_in(query: Tensor, key_value: Tensor, *_: object) -> Tensor:
    """Instead of attention: a result that changes if query, keys or values do."""
    group = query.shape[1] // key_value.shape[2]
    key, value = (part.repeat_interleave(group, 1) for part in key_value.unbind(1))
    return torch.tanh(query * key) + value


def _fuse_layer(layer: Any, layout: Layout, heads: Heads, keep: bool) -> FusedLayer:
    attention = getattr(layer, layout.attention)
    projections = _projections(attention, layout)
    qkv = split_heads(projections[0], heads.num_heads, keep) if layout.by_head else stacked(*projections, keep=keep)
    return FusedLayer(
        input_norm=known_norm(getattr(layer, layout.input_norm)),
        qkv=take_weights(qkv, keep),
        attention=attention.attached,
        output=take_weights(getattr(attention, layout.output), keep),
        post_norm=_norm(layer, layout.post_norm),
        up=take_weights(stacked(*_ups(layer, layout), keep=keep), keep),
        down=take_weights(attrgetter(layout.down)(layer), keep),
        query_norm=_norm(attention, layout.query_norm),
        key_norm=_norm(attention, layout.key_norm),
        attended_norm=_norm(layer, layout.attended_norm),
        mlp_norm=_norm(layer, layout.mlp_norm),
        activation=_activation(attrgetter(layout.activation)(layer)),
        multiplier=getattr(layer, "residual_multiplier", 1.0),
        # OPT scales queries before attention, which then has a scale of one.
        query_scale=attention.scaling if layout is OPT else 1.0,
        is_gated=layout.is_gated,
        is_parallel=layout.post_norm is None or getattr(layer, "use_parallel_residual", False),
    )


def _projections(attention: Any, layout: Layout) -> list[Any]:
    return [getattr(attention, name) for name in layout.qkv]


def _ups(layer: Any, layout: Layout) -> list[Any]:
    return [attrgetter(path)(layer) for path in layout.up]


def _norm(module: Any, name: str | None) -> Norm | None:
    return None if name is None else known_norm(getattr(module, name))


def _activation(module: Any) -> Activation | None:
    """None for silu, which the walk computes."""
    sample = torch.linspace(-3.0, 3.0, 7)
    activation: Activation = activation_of(module)
    return None if torch.equal(module(sample), F.silu(sample)) else activation


def _heads(layer: Any, layout: Layout) -> Heads:
    attention = getattr(layer, layout.attention)
    head_dim: int = attention.head_size if hasattr(attention, "head_size") else attention.head_dim
    num_heads = shape_of(getattr(attention, layout.output))[1] // head_dim
    rows = sum(shape_of(linear)[0] for linear in _projections(attention, layout))
    return Heads(num_heads, (rows // head_dim - num_heads) // 2, head_dim)
