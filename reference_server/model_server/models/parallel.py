"""Tensor parallelism: the part of each weight that a rank holds, and the modules that combine the ranks' results.

A plan is data (module pattern -> style). Transformers' plans are used as they are; `PLANS` adds the missing entries. A
model is cut before it has memory, so that a rank reads only its own part of a weight.

    colwise         this rank's outputs, whole heads in an attention; the result stays sharded
    rowwise         this rank's inputs; partial results are summed over the ranks
    packed_qkv      colwise, for queries, keys and values in one weight
    grouped_qkv     colwise, for one weight of groups: the queries of a K/V head, its key, its value
    packed_halves   colwise, for gate and up in one weight
    moe_tp_experts  this rank's part of the inner dimension of every expert; the results are summed over the ranks
    fused_experts   as moe_tp_experts, for weights of [experts * inner, hidden]
    query_heads     a weight with one row per query head; key_heads: per K/V head
    norm_queries    a norm over the queries of all heads, whose squares are summed over the ranks; norm_keys: of keys
    replicated      the whole weight on every rank

The embedding and the head are cut by vocabulary in every family. With fewer K/V heads than ranks, each rank holds the
K/V head that its queries read.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from reference_server.errors import UnsupportedError
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import transformers_compat
from reference_server.model_server.models.families import ModelFamily
from reference_server.model_server.options import Tier
from reference_server.model_server.weights.cut import Cut, even, vocabulary

Plan = Mapping[str, str]

_GPT2: Plan = {
    "h.*.attn.c_attn": "packed_qkv", "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise",
}  # fmt: skip
# Query, key and value of a head are adjacent, so whole heads are whole rows.
_BLOOM: Plan = {
    "h.*.self_attention.query_key_value": "colwise", "h.*.self_attention.dense": "rowwise",
    "h.*.mlp.dense_h_to_4h": "colwise", "h.*.mlp.dense_4h_to_h": "rowwise",
}  # fmt: skip
_OPT: Plan = {
    **{f"decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "decoder.layers.*.self_attn.out_proj": "rowwise",
    "decoder.layers.*.fc1": "colwise", "decoder.layers.*.fc2": "rowwise",
}  # fmt: skip
_PHI3: Plan = {
    "layers.*.self_attn.qkv_proj": "packed_qkv", "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_up_proj": "packed_halves", "layers.*.mlp.down_proj": "rowwise",
}  # fmt: skip
# The latent projections are small and have no heads: they are replicated.
_LATENT_ATTENTION: Plan = {
    "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
}  # fmt: skip

# Transformers' plans replicate some of these weights, depending on the release.
_EXPERTS: Plan = {"layers.*.mlp.experts": "moe_tp_experts"}
_ATTENTION: Plan = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}, "layers.*.self_attn.o_proj": "rowwise",
}  # fmt: skip
_PHIMOE: Plan = {**_ATTENTION, **_EXPERTS}
_QWEN2_MOE: Plan = {
    "layers.*.mlp.shared_expert.gate_proj": "colwise", "layers.*.mlp.shared_expert.up_proj": "colwise",
    "layers.*.mlp.shared_expert.down_proj": "rowwise", **_EXPERTS,
}  # fmt: skip
# Command R+ has a norm weight per head.
_COHERE: Plan = {"layers.*.self_attn.q_norm": "query_heads", "layers.*.self_attn.k_norm": "key_heads"}

_GPTJ: Plan = {
    **{f"h.*.attn.{name}_proj": "colwise" for name in "qkv"}, "h.*.attn.out_proj": "rowwise",
    "h.*.mlp.fc_in": "colwise", "h.*.mlp.fc_out": "rowwise",
}  # fmt: skip
_BIGCODE: Plan = {**_GPT2, "h.*.attn.c_attn": "grouped_qkv"}
_FALCON: Plan = {**_BLOOM, "h.*.self_attention.query_key_value": "grouped_qkv"}
_MPT: Plan = {
    "blocks.*.attn.Wqkv": "packed_qkv", "blocks.*.attn.out_proj": "rowwise",
    "blocks.*.ffn.up_proj": "colwise", "blocks.*.ffn.down_proj": "rowwise",
}  # fmt: skip
_DBRX: Plan = {
    "blocks.*.norm_attn_norm.attn.Wqkv": "packed_qkv", "blocks.*.norm_attn_norm.attn.out_proj": "rowwise",
    "blocks.*.ffn.experts": "fused_experts",
}  # fmt: skip
_STABLELM: Plan = {
    **_ATTENTION,
    "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise",
}  # fmt: skip
_OLMO2: Plan = {**_ATTENTION, "layers.*.self_attn.q_norm": "norm_queries", "layers.*.self_attn.k_norm": "norm_keys"}

PLANS: Mapping[str, Plan] = {
    "bloom": _BLOOM,
    "cohere": _COHERE,
    "cohere2": {},
    "dbrx": _DBRX,
    "deepseek_v2": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "falcon": _FALCON,
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gpt2": _GPT2,
    "gpt_bigcode": _BIGCODE,
    "gpt_neox": {},
    "gptj": _GPTJ,
    "granite": {},
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "mpt": _MPT,
    "olmo": {},
    "olmo2": _OLMO2,
    "opt": _OPT,
    "phi": {},
    "phi3": _PHI3,
    "phimoe": _PHIMOE,
    "qwen2": {},
    "qwen2_5_vl_text": {},
    "qwen2_vl_text": {},
    "qwen2_moe": _QWEN2_MOE,
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "stablelm": _STABLELM,
    "starcoder2": {},
}
"""The sharded language models, by `model_type`, with entries that add to Transformers' own plan or replace them."""


NOT_SHARDED: Mapping[Tier, str] = {
    "ragged": "it has no tensor-parallel plan",
    "padded": "the padded tier runs the model's own attention, which has no tensor-parallel plan",
    "encoder_decoder": "the encoder-decoder tier runs the model's own attention, which has no tensor-parallel plan",
    "recurrent": "its state is kept on one device",
}
"""The reasons to refuse a family that is not in `PLANS`, by tier."""


class RowParallelLinear(nn.Module):
    """`y = sum over ranks of x_r W_r + b`. Each rank holds a part of the inputs; the bias is added once."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.adapt: Callable[[Tensor, Tensor], None] | None = None
        """Adds the adapters' updates to this rank's part of the sum."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self._summed(hidden, F.linear(hidden, self.weight))

    def _summed(self, hidden: Tensor, partial: Tensor) -> Tensor:
        if self.adapt is not None:
            self.adapt(hidden, partial)
        dist.all_reduce(partial)
        return partial if self.bias is None else partial + self.bias


class RowParallelConv1D(RowParallelLinear):
    """GPT-2's linear, whose weight is [inputs, outputs]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self._summed(hidden, torch.matmul(hidden, self.weight))


class SummedNorm(nn.Module):
    """A root-mean-square norm over a dimension that the ranks share equally."""

    def __init__(self, norm: Any, group: RankGroup) -> None:
        super().__init__()
        self.weight = norm.weight
        self._epsilon: float = norm.variance_epsilon
        self._world_size = group.world_size

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        # K/V heads that several ranks hold are counted by each, as is their size.
        mean = wide.square().mean(-1, keepdim=True)
        dist.all_reduce(mean)
        normed = wide * torch.rsqrt(mean / self._world_size + self._epsilon)
        result: Tensor = self.weight * normed
        return result.to(hidden.dtype)


class GatheredLinear(nn.Module):
    """Each rank computes a part of the outputs and gets all. Parts have equal size; the last may have zero padding."""

    def __init__(self, linear: Any, group: RankGroup) -> None:
        super().__init__()
        self.out_features: int = linear.out_features
        self._world_size = group.world_size
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        part = F.linear(hidden, self.weight, self.bias)
        parts = [torch.empty_like(part) for _ in range(self._world_size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, -1)[..., : self.out_features]


class VocabularyEmbedding(nn.Module):
    """Each rank looks up the ids whose rows it holds; the lookups are summed over the ranks."""

    def __init__(self, embedding: Any, group: RankGroup) -> None:
        super().__init__()
        self._first = group.rank * -(-embedding.num_embeddings // group.world_size)
        self.weight = embedding.weight
        # Gemma scales its embeddings.
        self.embed_scale = getattr(embedding, "embed_scale", None)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: any shape; returns [..., hidden]."""
        rows = input_ids - self._first
        is_foreign = (rows < 0) | (rows >= self.weight.shape[0])
        found = F.embedding(rows.masked_fill(is_foreign, 0), self.weight)
        found = found.masked_fill_(is_foreign[..., None], 0.0)
        dist.all_reduce(found)
        return found if self.embed_scale is None else found * self.embed_scale.to(found.dtype)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Attention heads of the model and of one rank: query heads `[first, first + own)` and the K/V heads they read."""

    total: int
    total_kv: int
    group: RankGroup

    @property
    def own(self) -> int:
        return self.total // self.group.world_size

    @property
    def own_kv(self) -> int:
        return max(1, self.total_kv // self.group.world_size)

    @property
    def first(self) -> int:
        return self.group.rank * self.own

    @property
    def first_kv(self) -> int:
        return self.group.rank * self.total_kv // self.group.world_size

    def queries(self, head_size: int, offset: int = 0) -> tuple[int, int]:
        return offset + self.first * head_size, offset + (self.first + self.own) * head_size

    def keys(self, head_size: int, offset: int = 0) -> tuple[int, int]:
        return offset + self.first_kv * head_size, offset + (self.first_kv + self.own_kv) * head_size

    def groups(self, head_size: int) -> tuple[tuple[int, int], ...]:
        """Of a weight of groups: the queries of a K/V head, its key, its value."""
        queries = self.total // self.total_kv
        width = (queries + 2) * head_size
        first = self.first_kv * width
        if self.own >= queries:
            return ((first, first + self.own_kv * width),)
        start = first + (self.first - self.first_kv * queries) * head_size
        return (start, start + self.own * head_size), (first + queries * head_size, first + width)


def check(family: ModelFamily, config: Any, tier: Tier) -> None:
    """Raise UnsupportedError for a model that cannot be sharded in this tier."""
    language = config.get_text_config().model_type
    if family.has_images and language not in PLANS:
        raise UnsupportedError(f"sharded {family.name} with {language} is not supported: {NOT_SHARDED['ragged']}")
    if not family.has_images and family.model_type not in PLANS:
        raise UnsupportedError(f"sharded {family.name} is not supported: {NOT_SHARDED[family.tier]}")
    if tier != "ragged":
        raise UnsupportedError(f"sharded {family.name} is not supported in the {tier} tier")


def shard(model: Any, group: RankGroup) -> dict[str, Cut]:
    """Cut a language model without weights in place; returns this rank's part of each sharded weight, by name.

    Raises UnsupportedError for a size that cannot be divided.
    """
    return _Sharder(model, PLANS[model.config.model_type], group).run()


def finish(model: Any, group: RankGroup) -> None:
    """Keep the ALiBi slopes and the norms of this rank's heads. Call it after the shims are installed."""
    heads = _heads(model.config, group)
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


class _Sharder:
    """Cuts one model."""

    def __init__(self, model: Any, own_plan: Plan, group: RankGroup) -> None:
        self._model = model
        self._group = group
        self._heads = _heads(model.config, group)
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
                _set_own_heads(module, self._heads)
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


def _heads(config: Any, group: RankGroup) -> _Heads:
    total = config.num_attention_heads
    total_kv = _num_kv_heads(config) or total
    ranks = group.world_size
    if total % ranks or (total_kv % ranks and ranks % total_kv):
        raise UnsupportedError(
            f"the model has num_attention_heads {total} and num_key_value_heads {total_kv}, which cannot be divided "
            f"over {ranks} shards"
        )
    return _Heads(total, total_kv, group)


def _num_kv_heads(config: Any) -> int | None:
    """None for a model with as many K/V heads as query heads."""
    match config.model_type:
        case "gpt_bigcode":
            return 1 if config.multi_query else None
        case "falcon" if config.multi_query and not config.new_decoder_architecture:
            return 1
        case "falcon":
            return int(config.num_kv_heads)
        case "dbrx":
            return int(config.attn_config.kv_n_heads)
        case _:
            return getattr(config, "num_key_value_heads", None)


def _set_own_heads(attention: Any, heads: _Heads) -> None:
    """Set the head counts of an attention module to those of this rank."""
    own = {
        **dict.fromkeys(("num_heads", "n_heads", "num_attention_heads"), heads.own),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_heads"), heads.own_kv),
        "num_key_value_groups": heads.own // heads.own_kv,
    }
    # The sizes of the parts of a fused projection's result.
    head_dim = getattr(attention, "head_dim", None)
    if isinstance(head_dim, int) and hasattr(attention, "c_attn"):
        own |= dict.fromkeys(("split_size", "embed_dim"), heads.own * head_dim) | {"kv_dim": heads.own_kv * head_dim}
    if isinstance(head_dim, int) and hasattr(attention, "Wqkv"):
        own |= {"hidden_size": heads.own * head_dim}
    for name, value in own.items():
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, value)
    if hasattr(attention, "qkv_proj"):
        # Phi-3 reads the number of query heads from its config.
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads = heads.own


def _kind(name: str, module: Any) -> str:
    kind = type(module).__name__
    if type(module) is not nn.Linear and kind not in ("Conv1D", "FalconLinear"):
        raise UnsupportedError(f"{name} is a {kind}: only plain linears can be sharded")
    return kind


def _sum_over_ranks(_: nn.Module, __: object, result: Tensor) -> Tensor:
    dist.all_reduce(result)
    return result
