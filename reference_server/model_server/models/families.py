"""The supported model families, how each runs, and the refused model types."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from reference_server.errors import StartupError, UnsupportedError
from reference_server.model_server.models import transformers_compat
from reference_server.model_server.models.shims import bloom, falcon, gptj, mpt
from reference_server.model_server.options import Tier


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture of Transformers and the way it uses the paged attention.

    tier: the forward that runs it.
    shim: replaces inline attention modules of a class without Transformers' attention interface.
    has_position_table: positions are (or may be) rows of a table, whose length limits a request.
    own_class: class name in the config's `auto_map`, for a model with its own code.
    has_images: a language model of one of these families behind a vision tower.
    """

    name: str
    model_type: str
    tier: Tier = "ragged"
    shim: Callable[[nn.Module], None] | None = None
    has_position_table: bool = False
    own_class: str | None = None
    has_images: bool = False


def _calls_the_interface(_: nn.Module) -> None:
    """For a class that calls the attention interface without declaring it."""


FAMILIES = (
    ModelFamily("Llama", "llama"),
    ModelFamily("Mistral", "mistral"),
    ModelFamily("Mixtral", "mixtral"),
    ModelFamily("Qwen2", "qwen2"),
    ModelFamily("Qwen2-MoE", "qwen2_moe"),
    ModelFamily("Qwen3", "qwen3"),
    ModelFamily("Qwen3-MoE", "qwen3_moe"),
    ModelFamily("Gemma", "gemma"),
    ModelFamily("Gemma 2", "gemma2"),
    ModelFamily("Gemma 3", "gemma3_text"),
    ModelFamily("Phi", "phi"),
    ModelFamily("Phi-3", "phi3"),
    ModelFamily("PhiMoE", "phimoe"),
    ModelFamily("GPT-2", "gpt2", has_position_table=True),
    ModelFamily("GPT-NeoX", "gpt_neox"),
    ModelFamily("GPT-J", "gptj", shim=gptj.install, has_position_table=True),
    ModelFamily("GPT-BigCode", "gpt_bigcode", has_position_table=True),
    ModelFamily("StarCoder2", "starcoder2"),
    ModelFamily("OPT", "opt", has_position_table=True),
    ModelFamily("MPT", "mpt", shim=mpt.install),
    ModelFamily("Falcon", "falcon", shim=falcon.install),
    ModelFamily("BLOOM", "bloom", shim=bloom.install),
    ModelFamily("StableLM", "stablelm", shim=_calls_the_interface),
    ModelFamily("Cohere", "cohere"),
    ModelFamily("Cohere 2", "cohere2"),
    ModelFamily("Granite", "granite"),
    ModelFamily("OLMo", "olmo"),
    ModelFamily("OLMo 2", "olmo2"),
    ModelFamily("DBRX", "dbrx"),
    ModelFamily("DeepSeek-V2", "deepseek_v2"),
    ModelFamily("DeepSeek-V3", "deepseek_v3"),
    ModelFamily("LLaVA-NeXT", "llava_next", has_images=True),
    ModelFamily("Idefics 2", "idefics2", has_images=True),
    ModelFamily("Idefics 3", "idefics3", has_images=True),
    ModelFamily("SmolVLM", "smolvlm", has_images=True),
    ModelFamily("Qwen2-VL", "qwen2_vl", has_images=True),
    ModelFamily("Qwen2.5-VL", "qwen2_5_vl", has_images=True),
    ModelFamily("Gemma 3 with images", "gemma3", has_images=True),
    ModelFamily("PaliGemma", "paligemma", has_images=True),
    ModelFamily("GPT-Neo", "gpt_neo", tier="padded", has_position_table=True),
    ModelFamily("CodeGen", "codegen", tier="padded", has_position_table=True),
    ModelFamily("T5", "t5", tier="encoder_decoder"),
    ModelFamily("mT5", "mt5", tier="encoder_decoder"),
    ModelFamily("BART", "bart", tier="encoder_decoder", has_position_table=True),
    ModelFamily("Mamba", "mamba", tier="recurrent"),
    ModelFamily("Mamba 2", "mamba2", tier="recurrent"),
    ModelFamily("Falcon Mamba", "falcon_mamba", tier="recurrent"),
)


# Known model types that no tier supports.
REFUSED = {
    "RefinedWeb": "an old name: convert the config to Transformers' `falcon`",
    "RefinedWebModel": "an old name: convert the config to Transformers' `falcon`",
    "ssm": "use the model in Transformers' `mamba` format",
    "mllama": "some of its layers attend to images by cross-attention, in every step; the paged cache has K/V of the "
    "sequence's tokens only",
    **dict.fromkeys(
        ("idefics", "llava", "gemma3n", "llama4", "mistral3", "phi4_multimodal"), "its images are not served"
    ),
}


_TIER_OF_OWN_CODE: dict[str, Tier] = {"AutoModelForCausalLM": "padded", "AutoModelForSeq2SeqLM": "encoder_decoder"}
"""The tier of a model with its own code, by the key in its `auto_map`."""


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts")
# Least value, greatest value, names of the field in the families.
LIMITS = (
    (1, 1000, ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
               "decoder_layers")),
    (1, 4096, ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads", "num_kv_heads",
               "kv_n_heads", "encoder_attention_heads", "decoder_attention_heads")),
    (0, 4096, EXPERTS),
    (1, 1 << 21, ("vocab_size",)),
    (1, 1 << 27, ("max_position_embeddings", "n_positions", "max_seq_len", "original_max_position_embeddings")),
    (1, 1 << 17, ("hidden_size", "n_embd", "d_model", "head_dim", "word_embed_proj_dim")),
)  # fmt: skip
_RANGES = {name: (first, last) for first, last, names in LIMITS for name in names}


def find_family(config: dict[str, Any], *, trust_remote_code: bool = False) -> ModelFamily:
    """The family of a raw `config.json`. Raises StartupError for a model or a number that is not supported."""
    _check_limits(config)
    model_type = config.get("model_type")
    if "ssm_cfg" in config:
        raise UnsupportedError("this is Mamba's original format: use a checkpoint with `-hf` in its name")
    if model_type is None:
        raise UnsupportedError("config.json has no `model_type`: the architecture is unknown")
    if model_type in REFUSED:
        raise UnsupportedError(f"Unsupported model type {model_type}: {REFUSED[model_type]}")
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    if model_type in transformers_compat.seq2seq_model_types() and config.get("is_encoder_decoder", True):
        return ModelFamily(model_type, model_type, tier="encoder_decoder", has_position_table=True)
    if model_type in transformers_compat.causal_model_types():
        return ModelFamily(model_type, model_type, tier="padded", has_position_table=True)
    own_code = config.get("auto_map") or {}
    for name, tier in _TIER_OF_OWN_CODE.items():
        if name in own_code and not trust_remote_code:
            raise UnsupportedError(
                f"Unsupported model type {model_type}: it needs the code in its repository, which runs only with "
                "`--trust-remote-code`"
            )
        if name in own_code:
            return ModelFamily(model_type, model_type, tier, own_class=own_code[name], has_position_table=True)
    served = ", ".join(f"{family.name} ({family.model_type})" for family in FAMILIES)
    raise UnsupportedError(
        f"Unsupported model type {model_type}; supported are {served}, and any other causal or "
        "sequence-to-sequence language model of Transformers"
    )


def _check_limits(config: Mapping[str, Any]) -> None:
    """Raise StartupError for a number out of its range; nested configs included."""
    for name, value in _numbers(config):
        first, last = _RANGES[name.rpartition(".")[2]]
        if not isinstance(value, int) or not first <= value <= last:
            raise StartupError(f"config.json: `{name}` is {value!r:.40}, but must be an integer from {first} to {last}")


def _numbers(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of each field that has limits. A null means the default of the family."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif name in _RANGES and value is not None:
            yield prefix + name, value


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config, as a dict, is of a mixture of experts."""
    return any(count and name.rpartition(".")[2] in EXPERTS for name, count in _numbers(config))


def max_positions(config: Any) -> int | None:
    """The number of positions of the model; None if its config has none."""
    names = ("max_position_embeddings", "max_seq_len")
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
