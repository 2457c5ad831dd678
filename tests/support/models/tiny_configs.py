"""Configs of the tiny models: each family, and its variants that take another way through the code."""

from typing import Any

_WIDTH = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROTARY = {**_WIDTH, "intermediate_size": 80}
_GROUPED = {**_ROTARY, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 12,
}
_LATENT = {
    "num_key_value_heads": 4,
    **_ROTARY,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_GEMMA2 = {**_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 6}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    long_factor=[2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    original_max_position_embeddings=128,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_GROUPED},
    "llama-tied-llama3-rope": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        **_LLAMA3,
        **_ROTARY,
    },
    "llama-linear-rope": {"model_type": "llama", **_GROUPED, **_rope("linear", factor=4.0)},
    "llama-yarn-rope": {"model_type": "llama", **_GROUPED, **_YARN},
    # The prompts of the tests begin below and above these positions, and cross them.
    "llama-dynamic-rope": {
        "model_type": "llama",
        **_GROUPED,
        **_rope("dynamic", factor=2.0),
        "max_position_embeddings": 16,
    },
    "mistral-window": {"model_type": "mistral", **_GROUPED, "sliding_window": 6},
    "mixtral": {"model_type": "mixtral", **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 1, **_ROTARY},
    "qwen2-sharded": {"model_type": "qwen2", **_GROUPED},
    "qwen2-window-above": {
        "model_type": "qwen2",
        **_GROUPED,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen2-moe": {"model_type": "qwen2_moe", **_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen2-moe-window": {
        "model_type": "qwen2_moe",
        **_GROUPED,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": 6,
    },
    "qwen3": {"model_type": "qwen3", **_GROUPED, "head_dim": 16},
    "qwen3-moe": {"model_type": "qwen3_moe", **_GROUPED, **_EXPERTS, "norm_topk_prob": True},
    "gemma": {"model_type": "gemma", **_GROUPED, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **_GEMMA2, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3": {
        "model_type": "gemma3_text",
        **_GEMMA2,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "phi": {"model_type": "phi", **_ROTARY, "partial_rotary_factor": 0.5},
    "phi3": {"model_type": "phi3", **_GROUPED},
    "phi3-longrope": {"model_type": "phi3", **_GROUPED, **_LONGROPE, "original_max_position_embeddings": 128},
    "phimoe": {"model_type": "phimoe", **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe-window": {
        "model_type": "phimoe",
        **_GROUPED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gpt2-scaled-by-layer": {"model_type": "gpt2", **_GPT2, "scale_attn_by_inverse_layer_idx": True},
    "gpt-neox": {"model_type": "gpt_neox", **_ROTARY, "rotary_pct": 0.5},
    "gpt-neox-serial": {"model_type": "gpt_neox", **_ROTARY, "use_parallel_residual": False},
    "gptj": {"model_type": "gptj", **_GPT2, "rotary_dim": 8},
    "gpt-bigcode": {"model_type": "gpt_bigcode", **_GPT2},
    "gpt-bigcode-many-heads": {"model_type": "gpt_bigcode", **_GPT2, "multi_query": False},
    "starcoder2": {"model_type": "starcoder2", **_GROUPED, "sliding_window": 6},
    "opt": {"model_type": "opt", **_WIDTH, "ffn_dim": 80, "word_embed_proj_dim": 48},
    "opt-post-norm": {
        "model_type": "opt",
        **_WIDTH,
        "ffn_dim": 80,
        "word_embed_proj_dim": 24,
        "do_layer_norm_before": False,
    },
    "mpt": {"model_type": "mpt", "d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "mpt-6-heads": {
        "model_type": "mpt",
        "d_model": 48,
        "n_layers": 2,
        "n_heads": 6,
        "max_seq_len": 256,
        "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3},
    },
    "falcon": {"model_type": "falcon", **_WIDTH, "multi_query": True},
    "falcon-groups": {
        "model_type": "falcon",
        **_WIDTH,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "falcon-serial": {"model_type": "falcon", **_WIDTH, "multi_query": False, "parallel_attn": False, "bias": True},
    "falcon-alibi": {
        "model_type": "falcon",
        **_WIDTH,
        "num_attention_heads": 6,
        "multi_query": False,
        "alibi": True,
        "parallel_attn": False,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 4},
    "bloom-6-heads": {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 6},
    "stablelm": {"model_type": "stablelm", **_GROUPED, "partial_rotary_factor": 0.5},
    "stablelm-parallel": {
        "model_type": "stablelm",
        **_GROUPED,
        "partial_rotary_factor": 0.5,
        "use_parallel_residual": True,
        "qk_layernorm": True,
        "use_qkv_bias": True,
    },
    "cohere": {"model_type": "cohere", **_GROUPED, "use_qk_norm": True, "logit_scale": 1.0},
    "cohere2": {
        "model_type": "cohere2",
        **_GROUPED,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "logit_scale": 1.0,
    },
    "granite": {
        "model_type": "granite",
        **_GROUPED,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "olmo": {"model_type": "olmo", **_GROUPED, "clip_qkv": 1.0},
    "olmo2": {"model_type": "olmo2", **_GROUPED},
    "dbrx": {
        "model_type": "dbrx",
        "d_model": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 48},
    },
    "deepseek-v2": {"model_type": "deepseek_v2", **_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **_LATENT,
        "q_lora_rank": 16,
        **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7),
    },
}
