"""Tensor parallelism: cuts a model to the part of each weight that this rank holds.

A model is cut before it has memory, so that a rank reads only its own part of a weight. The embedding and the head are
cut by vocabulary in every family, other modules by the model's plan.
"""

import re
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from reference_server.errors import UnsupportedError
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import transformers_compat
from reference_server.model_server.models.tensor_parallel.plans import PLANS, Plan
from reference_server.model_server.models.tensor_parallel.rank_heads import heads_of, set_own_heads
from reference_server.model_server.models.tensor_parallel.rank_modules import (
    GatheredLinear,
    RowParallelConv1D,
    RowParallelLinear,
    SummedNorm,
    VocabularyEmbedding,
)
from reference_server.model_server.weights.cut import Cut, even, vocabulary


def cut_model(model: Any, group: RankGroup) -> dict[str, Cut]:
    """Cut a language model without weights in place; returns this rank's part of each sharded weight, by name.

    Raises UnsupportedError for a size that cannot be divided.
    """
    return _ModelCutter(model, PLANS[model.config.model_type], group).run()


def keep_own_heads(model: Any, group: RankGroup) -> None:
    """Keep the ALiBi slopes and the norms of this rank's heads. Call it after the shims are installed."""
    heads = heads_of(model.config, group)
    queries, keys = slice(*heads.queries(1)), slice(*heads.keys(1))
    for module in model.modules():
        options = getattr(module, "options", None)
        if options is not None and options.alibi_slopes is not None:
            module.options = replace(options, alibi_slopes=options.alibi_slopes[queries].contiguous())
        # StableLM has a norm for each head.
        for name, own in (("q_layernorm", queries), ("k_layernorm", keys)):
            per_head: Any = getattr(module, name, None)
            if isinstance(getattr(per_head, "norms", None), nn.ModuleList):
                per_head.norms = per_head.norms[own]


class _ModelCutter:
    """Cuts one model."""

    def __init__(self, model: Any, own_plan: Plan, group: RankGroup) -> None:
        self._model = model
        self._group = group
        self._heads = heads_of(model.config, group)
        prefix = model.base_model_prefix
        self._plan = transformers_compat.tensor_parallel_plan(model)
        self._plan |= {f"{prefix}.{pattern}": style for pattern, style in own_plan.items()}
        self._cuts: dict[str, Cut] = {}

    def run(self) -> dict[str, Cut]:
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        for name, module in list(self._model.named_modules()):
            if module is embedding:
                self._vocabulary(name, module, VocabularyEmbedding(module, self._group))
            elif module is head:
                self._vocabulary(name, module, GatheredLinear(module, self._group))
            else:
                self._apply(name, module, self._style(name))
            if getattr(module, "layer_idx", None) is not None:
                set_own_heads(module, self._heads)
        return self._cuts

    def _vocabulary(self, name: str, module: Any, replacement: nn.Module) -> None:
        for leaf, parameter in module.named_parameters(recurse=False):
            self._cuts[f"{name}.{leaf}"] = vocabulary(parameter.shape[0], self._group.rank, self._group.world_size)
        self._replace(name, replacement)

    def _apply(self, name: str, module: Any, style: str | None) -> None:
        match style:
            case None | "replicated" | "replicated_with_grad_allreduce" | "mla_kv_a_proj":
                return
            case "colwise" | "packed_qkv" | "grouped_qkv" | "packed_halves":
                self._columns(name, module, style)
            case "rowwise":
                self._rows(name, module)
            case "query_heads" | "key_heads":
                span = self._heads.queries(1) if style == "query_heads" else self._heads.keys(1)
                self._cuts[f"{name}.weight"] = Cut(0, (span,))
            case "norm_queries" | "norm_keys":
                self._norm(name, module, style)
            case "moe_tp_experts":
                self._experts(name, module)
            case "fused_experts":
                self._fused_experts(name, module)
            case _:
                raise UnsupportedError(f"{name}: the tensor-parallel style {style!r} is not supported")

    def _style(self, name: str) -> str | None:
        """The style of a module. Patterns have `*` in place of a layer number."""
        return self._plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))

    def _columns(self, name: str, module: Any, style: str) -> None:
        kind = _kind(name, module)
        outputs = 1 if kind == "Conv1D" else 0
        cut = self._column_cut(name, module.weight.shape[outputs], style)
        self._cuts[f"{name}.weight"] = replace(cut, dim=outputs)
        if module.bias is not None:
            self._cuts[f"{name}.bias"] = cut
        if kind == "Conv1D":
            module.nf = cut.size
        else:
            module.out_features = cut.size

    def _column_cut(self, name: str, size: int, style: str) -> Cut:
        heads = self._heads
        if style == "packed_qkv":
            head_size = size // (heads.total + 2 * heads.total_kv)
            first_key, first_value = heads.total * head_size, (heads.total + heads.total_kv) * head_size
            keys, values = heads.keys(head_size, first_key), heads.keys(head_size, first_value)
            return Cut(0, (heads.queries(head_size), keys, values))
        if style == "grouped_qkv":
            return Cut(0, heads.groups(size // (heads.total + 2 * heads.total_kv)))
        if name.endswith((".k_proj", ".v_proj")):
            return Cut(0, (heads.keys(size // heads.total_kv),))
        return self._even(name, size, (1, 1) if style == "packed_halves" else (1,))

    def _rows(self, name: str, module: Any) -> None:
        kind = _kind(name, module)
        inputs = 0 if kind == "Conv1D" else 1
        self._cuts[f"{name}.weight"] = replace(self._even(name, module.weight.shape[inputs]), dim=inputs)
        self._replace(name, RowParallelConv1D(module) if kind == "Conv1D" else RowParallelLinear(module))

    def _experts(self, name: str, module: Any) -> None:
        inner = self._even(name, module.down_proj.shape[2])
        self._cuts[f"{name}.gate_up_proj"] = replace(self._even(name, module.gate_up_proj.shape[1], (1, 1)), dim=1)
        self._cuts[f"{name}.down_proj"] = replace(inner, dim=2)
        module.intermediate_dim = inner.size
        module.register_forward_hook(_sum_over_ranks)

    def _fused_experts(self, name: str, module: Any) -> None:
        for leaf in ("w1", "v1", "w2"):
            weight = getattr(module.mlp, leaf)
            self._cuts[f"{name}.mlp.{leaf}"] = self._even(name, weight.shape[0], (1,) * module.num_experts)
        module.ffn_hidden_size //= self._group.world_size
        module.register_forward_hook(_sum_over_ranks)

    def _norm(self, name: str, module: Any, style: str) -> None:
        heads, size = self._heads, module.weight.shape[0]
        is_query = style == "norm_queries"
        span = heads.queries(size // heads.total) if is_query else heads.keys(size // heads.total_kv)
        self._cuts[f"{name}.weight"] = Cut(0, (span,))
        self._replace(name, SummedNorm(module, self._group))

    def _even(self, name: str, size: int, blocks: tuple[int, ...] = (1,)) -> Cut:
        try:
            return even(size, 0, self._group.rank, self._group.world_size, blocks)
        except ValueError as error:
            raise UnsupportedError(f"{name}: {error}") from error

    def _replace(self, name: str, replacement: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self._model.get_submodule(parent), child, replacement)


def _kind(name: str, module: Any) -> str:
    kind = type(module).__name__
    if type(module) is not nn.Linear and kind not in ("Conv1D", "FalconLinear"):
        raise UnsupportedError(f"{name} is a {kind}: only plain linears can be sharded")
    return kind


def _sum_over_ranks(_: nn.Module, __: object, result: Tensor) -> Tensor:
    dist.all_reduce(result)
    return result
