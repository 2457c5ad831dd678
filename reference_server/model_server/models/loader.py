"""Load one model: config, family, dtype, weights from files or seeded random weights.

The model is built without memory and cut to this rank's part before it gets weights, so that a rank never holds the
weights of another rank.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from reference_server import model_files
from reference_server.errors import StartupError, UnsupportedError
from reference_server.json_files import read_json
from reference_server.model_files import ModelPaths
from reference_server.model_server.cpu_kernels.processor import has_bfloat16, has_bfloat16_product
from reference_server.model_server.device import choose_device
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import rotary, transformers_compat, vision
from reference_server.model_server.models.adapters.linears import AdaptableLinear, linears_of, shapes_of
from reference_server.model_server.models.cache_type import CacheType
from reference_server.model_server.models.families import ModelFamily, find_family, has_experts
from reference_server.model_server.models.generation_defaults import ignored
from reference_server.model_server.models.hooks import ATTENTION_NAME, register
from reference_server.model_server.models.language_part import LanguagePart
from reference_server.model_server.models.materialize import Materializer
from reference_server.model_server.models.quantizer import (
    Quantizer,
    kernels_of,
    quantizable,
    quantized_bytes,
    round_head,
)
from reference_server.model_server.models.tensor_parallel.cut_model import cut_model, keep_own_heads
from reference_server.model_server.models.tensor_parallel.plans import check_sharding
from reference_server.model_server.models.vision import VisionTower
from reference_server.model_server.options import EngineOptions, Tier
from reference_server.model_server.quantization import schemes
from reference_server.model_server.quantization.packed_checkpoint import PackedCheckpoint
from reference_server.model_server.quantization.schemes import Quantization
from reference_server.model_server.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with the facts that the engine needs.

    vision: of a model with images, whose language model is `model`, and whose text config is `config`.
    cache: the type and the scales of the K/V cache.
    directory: of its config. linears: those that adapters may change, by name. own_name: the name in `model` of one
    that an adapter has.
    """

    model: Any
    config: PretrainedConfig
    family: ModelFamily
    dtype: torch.dtype
    device: torch.device
    eos_ids: frozenset[int]
    quantization: Quantization | None = None
    vision: VisionTower | None = None
    cache: CacheType = field(default_factory=CacheType)
    directory: Path | None = None
    linears: Mapping[str, AdaptableLinear] = field(default_factory=dict)
    own_name: Callable[[str], str] = str

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's parameters, shared ones counted once."""
        vision = [] if self.vision is None else self.vision.parameters()
        seen = {parameter.data_ptr(): parameter for parameter in (*self.model.parameters(), *vision)}
        plain: int = sum(parameter.nbytes for parameter in seen.values())
        return plain + quantized_bytes(self.model)

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels that multiply the quantized weights."""
        return kernels_of(self.model)


def locate(options: EngineOptions) -> ModelPaths:
    """The files of the model. Raises StartupError if there are none."""
    patterns = ["*.json", "*.model", "*.txt"]
    if options.load_format != "dummy":
        patterns.append("*.safetensors")
    if options.trust_remote_code:
        patterns.append("*.py")
    return model_files.locate(options.model_id, options.revision, options.hub_cache, patterns)


def load(
    options: EngineOptions,
    files: ModelPaths,
    group: RankGroup,
    device: torch.device | None = None,
    admit: Callable[[int], None] | None = None,
) -> LoadedModel:
    """Load this rank's part of the model, with the paged attention registered.

    device: default is the device of the rank. admit: is called with the bytes of the whole model's parameters before
    any weight is read, and raises if they are too many.
    """
    register()
    transformers_compat.quiet()
    raw = read_json(files.directory / "config.json")
    family = find_family(raw, trust_remote_code=options.trust_remote_code)
    tier = options.tier or family.tier
    device = device or choose_device(group.rank)
    config = _config(files, family)
    _warn(options, files, family, raw)
    _refuse_unserved(options, family, config, tier, group)
    quantization = _quantization(options, files, raw, tier, device)
    dtype = resolve_dtype(options, device, config, quantization, is_packed=_is_packed(family, tier, config))
    if options.rope is not None:
        rotary.override(config.get_text_config(), options.rope)
    model = _build_empty(config, files, family, tier, dtype)
    if admit is not None:
        admit(_expected_bytes(model, family.has_images, quantization, dtype))
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    part = LanguagePart.of(model, dtype, family.has_images)
    linears = shapes_of(part.model)
    own_cuts = cut_model(part.model, group) if group.world_size > 1 else {}
    part.share_head(of_part=True)
    cuts = part.by_whole_name(own_cuts)
    quantizer = None
    if quantization is not None:
        quantizer = Quantizer(model, quantization, _quantizable(part, quantization), cuts, dtype, device)
    materializer = Materializer(model, shapes, cuts, dtype, device, quantizer)
    checkpoint = _fill(materializer, options, files, quantization)
    model.eval().requires_grad_(False)
    _refuse_unloaded(model)
    if tier == "ragged" and family.shim is not None:
        family.shim(model)
    if group.world_size > 1:
        keep_own_heads(part.model, group)
    if quantization is not None:
        round_head(model, dtype, device)
    part.share_head(of_part=False)
    cache = CacheType.of(options, raw, device, model, checkpoint)
    tower = VisionTower(model, files.directory, dtype, device) if family.has_images else None
    return LoadedModel(
        *(part.model, vision.text_config(config) if family.has_images else config, family, dtype, device),
        *(_eos_ids(files.directory, config), quantization),
        vision=tower,
        cache=cache,
        directory=files.directory,
        linears=linears_of(linears, own_cuts),
        own_name=part.own_name,
    )


def _warn(options: EngineOptions, files: ModelPaths, family: ModelFamily, raw: Mapping[str, Any]) -> None:
    """Log what a model's repository changes: its own code, and settings that are not applied."""
    if family.own_class is not None:
        names = (family.own_class, options.model_id, files.directory)
        logger.warning("running %s, code in the repository of %s, from %s", *names)
    for name, value in ignored(_generation_config(files.directory), raw).items():
        logger.warning("`%s: %s` of the model's files is not applied: requests set their own parameters", name, value)


def _refuse_unserved(options: EngineOptions, family: ModelFamily, config: Any, tier: Tier, group: RankGroup) -> None:
    """Raise UnsupportedError for a model that this tier, or this number of ranks, does not serve."""
    if group.world_size > 1:
        check_sharding(family, config, tier)
    if getattr(config, "is_causal", None) is False and not config.is_encoder_decoder:
        raise UnsupportedError(f"{options.model_id} has `is_causal: false`: its tokens attend to later ones")
    if family.has_images and tier != "ragged":
        raise UnsupportedError(f"{family.name} takes images, which the {tier.replace('_', '-')} tier does not")


def _build_empty(config: Any, files: ModelPaths, family: ModelFamily, tier: Tier, dtype: torch.dtype) -> Any:
    """The model without memory, with the attention of its tier."""
    model_class = model_class_of(config, files, family, tier)
    text_class = (vision.text_class(config) if family.has_images else None) or model_class
    if tier == "ragged" and family.shim is None and not text_class.is_backend_compatible():
        raise UnsupportedError(f"{text_class.__name__} does not support Transformers' attention interface")
    model = transformers_compat.build_empty(model_class, config, dtype)
    if tier == "ragged":
        # This name stops Transformers from building a mask. Shimmed classes would reject it in the constructor.
        attending = vision.inner_language_model(model) if family.has_images else model
        attending.config._attn_implementation = ATTENTION_NAME
    else:
        model.set_attn_implementation("eager")
    return model


def _fill(
    materializer: Materializer, options: EngineOptions, files: ModelPaths, quantization: Quantization | None
) -> Checkpoint | None:
    """Fill the model from its checkpoint, which is returned, or with random weights."""
    if _is_dummy(options, files):
        materializer.fill_random(options.seed)
        return None
    checkpoint = Checkpoint.open(options.weights_override or files.directory)
    form = None if quantization is None else quantization.form
    materializer.fill(checkpoint if form is None else PackedCheckpoint(checkpoint, form))
    return checkpoint


def _expected_bytes(model: Any, has_images: bool, quantization: Quantization | None, dtype: torch.dtype) -> int:
    """Bytes of all parameters of a whole model that has no memory yet."""
    tied = transformers_compat.tied_names(model)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters() if name not in tied}
    if quantization is not None:
        for name in _quantizable(LanguagePart.of(model, dtype, has_images), quantization):
            sizes[name] = int(sizes[name] * quantization.bits / (8 * dtype.itemsize))
    return sum(sizes.values())


def _quantizable(part: LanguagePart, quantization: Quantization) -> list[str]:
    """Names of the weights that a method quantizes in a plain checkpoint."""
    return [part.whole_name(name) for name in quantizable(part.model, quantization)]


def _quantization(
    options: EngineOptions, files: ModelPaths, raw: dict[str, Any], tier: Tier, device: torch.device
) -> Quantization | None:
    dummy = _is_dummy(options, files)
    return schemes.choose(options.quantize, raw, files.directory, tier=tier, device=device, dummy=dummy)


def _is_dummy(options: EngineOptions, files: ModelPaths) -> bool:
    return options.load_format == "dummy" or not files.has_weights


def _config(files: ModelPaths, family: ModelFamily) -> PretrainedConfig:
    """The config. The model's own code reads it only with `--trust-remote-code`, see `find_family`."""
    return AutoConfig.from_pretrained(files.directory, trust_remote_code=family.own_class is not None)


def model_class_of(config: PretrainedConfig, files: ModelPaths, family: ModelFamily, tier: Tier) -> Any:
    """The class in Transformers, or that of the model's own code."""
    if family.own_class is not None:
        return get_class_from_dynamic_module(family.own_class, files.directory)
    if family.has_images:
        return AutoModelForImageTextToText._model_mapping[type(config)]
    auto_class = AutoModelForSeq2SeqLM if tier == "encoder_decoder" else AutoModelForCausalLM
    return auto_class._model_mapping[type(config)]


def resolve_dtype(
    options: EngineOptions,
    device: torch.device,
    config: PretrainedConfig,
    quantization: Quantization | None = None,
    *,
    is_packed: bool = False,
) -> torch.dtype:
    """`--dtype`; else the dtype of the config on an accelerator, and the fastest dtype of the processor on a CPU.

    is_packed: whether the model computes almost only packed linears and attention, which have kernels for bfloat16 on
    processors without instructions for it.
    """
    if options.dtype is not None:
        return {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    if device.type != "cpu" and quantization is not None:
        # The dtype of torch's int4 and int8 products.
        return torch.bfloat16
    if device.type != "cpu":
        return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    return torch.bfloat16 if has_bfloat16() or (is_packed and has_bfloat16_product()) else torch.float32


def _is_packed(family: ModelFamily, tier: Tier, config: PretrainedConfig) -> bool:
    """Whether the model is a decoder without other large parts: vision towers and experts stay plain."""
    return tier == "ragged" and not family.has_images and not has_experts(config.to_dict())


def _refuse_unloaded(model: Any) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if names:
        raise StartupError(f"the checkpoint has no weights for {', '.join(names)}")


def _generation_config(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _eos_ids(directory: Path, config: PretrainedConfig) -> frozenset[int]:
    """Ids that end a generation: from the generation config, else from the config."""
    listed = _generation_config(directory).get("eos_token_id")
    for each in (config, config.get_text_config()):
        if listed is None:
            listed = getattr(each, "eos_token_id", None)
    if listed is None:
        return frozenset()
    return frozenset([listed] if isinstance(listed, int) else listed)
