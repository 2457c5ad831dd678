"""The model families that are served: how each runs, what it needs, and what is refused by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from reference_server.errors import UnsupportedError
from reference_server.model_server.models import config_limits, transformers_compat
from reference_server.model_server.models.shims import bloom, falcon, gptj, mpt
from reference_server.model_server.options import Tier


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture of Transformers and how it reaches the paged attention.

    tier: which forward runs it.
    shim: replaces inline attention modules, for a class that does not offer Transformers' attention interface.
    has_position_table: positions are, or may be, rows of a table, so that a longer request cannot be computed.
    own_class: the class of a model that brings its code, as the config's `auto_map` names it.
    """

    name: str
    model_type: str
    tier: Tier = "ragged"
    shim: Callable[[nn.Module], None] | None = None
    has_position_table: bool = False
    own_class: str | None = None


def _calls_the_interface(_: nn.Module) -> None:
    """A class that does call the attention interface, though it does not say so to the loader."""


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
    ModelFamily("GPT-Neo", "gpt_neo", tier="padded", has_position_table=True),
    ModelFamily("CodeGen", "codegen", tier="padded", has_position_table=True),
    ModelFamily("T5", "t5", tier="encoder_decoder"),
    ModelFamily("mT5", "mt5", tier="encoder_decoder"),
    ModelFamily("BART", "bart", tier="encoder_decoder", has_position_table=True),
    ModelFamily("Mamba", "mamba", tier="recurrent"),
    ModelFamily("Mamba 2", "mamba2", tier="recurrent"),
    ModelFamily("Falcon Mamba", "falcon_mamba", tier="recurrent"),
)


# What is known and not served in any tier.
REFUSED = {
    "RefinedWeb": "an old name: convert the config to Transformers' `falcon`",
    "RefinedWebModel": "an old name: convert the config to Transformers' `falcon`",
    "ssm": "use the model in Transformers' `mamba` format",
    **dict.fromkeys(
        (
            *("idefics", "idefics2", "idefics3", "llava", "llava_next", "paligemma", "qwen2_vl", "qwen2_5_vl"),
            *("mllama", "gemma3", "gemma3n", "llama4", "mistral3", "phi4_multimodal"),
        ),
        "models that see images are not served",
    ),
}


_TIER_OF_OWN_CODE: dict[str, Tier] = {"AutoModelForCausalLM": "padded", "AutoModelForSeq2SeqLM": "encoder_decoder"}
"""Keys of a config's `auto_map`, and how a model that brings its code runs."""


def find_family(config: dict[str, Any], *, trust_remote_code: bool = False) -> ModelFamily:
    """The family of a raw `config.json`; what is not served is refused by name, and numbers out of bounds."""
    config_limits.check(config)
    model_type = config.get("model_type")
    if "ssm_cfg" in config:
        raise UnsupportedError("this is Mamba's original format; its `-hf` checkpoints are served")
    if model_type is None:
        raise UnsupportedError("config.json has no `model_type`, so the architecture is not known")
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
                f"Unsupported model type {model_type}: its code comes with the model and runs only with "
                "`--trust-remote-code`"
            )
        if name in own_code:
            return ModelFamily(model_type, model_type, tier, own_class=own_code[name], has_position_table=True)
    served = ", ".join(f"{family.name} ({family.model_type})" for family in FAMILIES)
    raise UnsupportedError(
        f"Unsupported model type {model_type}; served are {served}, and any other that Transformers has a "
        "causal or sequence-to-sequence language model for"
    )


def max_positions(config: Any) -> int | None:
    """The longest request that the model was made for, if its config says so."""
    names = ("max_position_embeddings", "max_seq_len")
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
