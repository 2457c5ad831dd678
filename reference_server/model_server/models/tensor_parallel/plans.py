"""Tensor-parallel plans by model type: the style in which the weights of each module are cut over the ranks.

A plan is data (module pattern -> style). Transformers' plans are used as they are; `PLANS` adds the missing entries.

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
"""

from collections.abc import Mapping
from typing import Any

from reference_server.errors import UnsupportedError
from reference_server.model_server.models.families import ModelFamily
from reference_server.model_server.options import Tier

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


def check_sharding(family: ModelFamily, config: Any, tier: Tier) -> None:
    """Raise UnsupportedError for a model that cannot be sharded in this tier."""
    language = config.get_text_config().model_type
    if family.has_images and language not in PLANS:
        raise UnsupportedError(f"sharded {family.name} with {language} is not supported: {NOT_SHARDED['ragged']}")
    if not family.has_images and family.model_type not in PLANS:
        raise UnsupportedError(f"sharded {family.name} is not supported: {NOT_SHARDED[family.tier]}")
    if tier != "ragged":
        raise UnsupportedError(f"sharded {family.name} is not supported in the {tier} tier")
