"""Load one model: config, family, dtype, weights or seeded random ones; what is not served is refused by name.

The model is built without memory, cut to this rank's share, and only then given weights, so that no rank ever holds
what is another's.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from reference_server.errors import ArgumentError, StartupError, UnsupportedError
from reference_server.model_server.device import choose_device
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import parallel, rotary, transformers_compat
from reference_server.model_server.models.families import ModelFamily, find_family
from reference_server.model_server.models.hooks import ATTENTION_NAME, register
from reference_server.model_server.models.materialize import Materializer
from reference_server.model_server.models.quantize import Quantizer, kernels_of, quantizable, quantized_bytes
from reference_server.model_server.options import EngineOptions, Tier
from reference_server.model_server.quantization import schemes
from reference_server.model_server.quantization.packed_checkpoint import PackedCheckpoint
from reference_server.model_server.quantization.schemes import Quantization
from reference_server.model_server.weights.checkpoint import Checkpoint
from reference_server.presets import catalog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's parts lie on this machine."""

    directory: Path
    tokenizer_directory: Path
    has_weights: bool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory with what the engine has to know of it."""

    model: Any
    config: PretrainedConfig
    family: ModelFamily
    dtype: torch.dtype
    device: torch.device
    eos_ids: frozenset[int]
    quantization: Quantization | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's parameters, shared ones counted once."""
        seen = {parameter.data_ptr(): parameter for parameter in self.model.parameters()}
        plain: int = sum(parameter.nbytes for parameter in seen.values())
        return plain + quantized_bytes(self.model)

    @property
    def kernels(self) -> list[str]:
        """What multiplies the quantized weights."""
        return kernels_of(self.model)


def locate(options: EngineOptions) -> ModelFiles:
    """Find the files: a preset, a local directory, or a hub id that has been downloaded before."""
    try:
        preset = catalog.find(options.model_id)
    except ValueError as error:
        raise ArgumentError(f"`--model-id`: {error}") from error
    if preset is not None:
        return ModelFiles(preset.directory, preset.tokenizer_directory, preset.has_weights)
    directory = Path(options.model_id)
    if not directory.is_dir():
        directory = _hub_snapshot(options)
    return ModelFiles(directory, directory, has_weights=True)


def _hub_snapshot(options: EngineOptions) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = ["*.json", "*.model", "*.txt", "*.safetensors"]
    if options.load_format == "dummy":
        patterns.remove("*.safetensors")
    if options.trust_remote_code:
        patterns.append("*.py")
    try:
        return Path(snapshot_download(options.model_id, revision=options.revision, allow_patterns=patterns))
    except (LocalEntryNotFoundError, OSError) as error:
        raise StartupError(
            f"model {options.model_id!r} is neither a preset, a local directory nor available from the hub: {error}"
        ) from error


def load(
    options: EngineOptions, files: ModelFiles, group: RankGroup, device: torch.device | None = None
) -> LoadedModel:
    """Bring this rank's share of the model into memory with our attention registered, ready for the probe.

    device: where it goes, by default the rank's own.
    """
    register()
    transformers_compat.quiet()
    raw = json.loads((files.directory / "config.json").read_text())
    family = find_family(raw, trust_remote_code=options.trust_remote_code)
    if family.own_class is not None:
        names = (family.own_class, options.model_id, files.directory)
        logger.warning("running %s, code that came with %s, from %s", *names)
    tier = options.tier or family.tier
    if group.world_size > 1:
        parallel.check(family, tier)
    device = device or choose_device(group.rank)
    config = _config(files, family)
    quantization = _quantization(options, files, raw, tier, device)
    dtype = resolve_dtype(options, device, config, quantization)
    if options.rope is not None:
        rotary.override(config, options.rope)
    model_class = _model_class(config, files, family, tier)
    if tier == "ragged" and family.shim is None and not model_class.is_backend_compatible():
        raise UnsupportedError(f"{model_class.__name__} does not offer Transformers' attention interface")
    model = transformers_compat.build_empty(model_class, config, dtype)
    if tier == "ragged":
        # The name alone keeps Transformers from building a mask; shimmed classes would refuse it in the constructor.
        model.config._attn_implementation = ATTENTION_NAME
    else:
        model.set_attn_implementation("eager")
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    cuts = parallel.shard(model, family, group) if group.world_size > 1 else {}
    quantizer = None if quantization is None else Quantizer(model, quantization, cuts, dtype, device)
    materializer = Materializer(model, shapes, cuts, dtype, device, quantizer)
    if _is_dummy(options, files):
        materializer.fill_random(options.seed)
    else:
        checkpoint = Checkpoint.open(options.weights_override or files.directory)
        form = None if quantization is None else quantization.form
        materializer.fill(checkpoint if form is None else PackedCheckpoint(checkpoint, form))
    model.eval().requires_grad_(False)
    _refuse_unloaded(model)
    if tier == "ragged" and family.shim is not None:
        family.shim(model)
    if group.world_size > 1:
        parallel.finish(model, group)
    return LoadedModel(model, config, family, dtype, device, _eos_ids(files.directory, config), quantization)


def expected_weight_bytes(options: EngineOptions, files: ModelFiles) -> int:
    """Bytes that the whole model's parameters will take, read off its config alone."""
    raw = json.loads((files.directory / "config.json").read_text())
    family = find_family(raw, trust_remote_code=options.trust_remote_code)
    config = _config(files, family)
    device, tier = choose_device(), options.tier or family.tier
    quantization = _quantization(options, files, raw, tier, device)
    dtype = resolve_dtype(options, device, config, quantization)
    with torch.device("meta"), transformers_compat.without_weight_init():
        model: Any = _model_class(config, files, family, tier)._from_config(config, dtype=dtype)
    tied = transformers_compat.tied_names(model)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters() if name not in tied}
    if quantization is not None:
        for name in quantizable(model, quantization):
            sizes[name] = int(sizes[name] * quantization.bits / (8 * dtype.itemsize))
    return sum(sizes.values())


def _quantization(
    options: EngineOptions, files: ModelFiles, raw: dict[str, Any], tier: Tier, device: torch.device
) -> Quantization | None:
    dummy = _is_dummy(options, files)
    return schemes.choose(options.quantize, raw, files.directory, tier=tier, device=device, dummy=dummy)


def _is_dummy(options: EngineOptions, files: ModelFiles) -> bool:
    return options.load_format == "dummy" or not files.has_weights


def _config(files: ModelFiles, family: ModelFamily) -> PretrainedConfig:
    """The config, read by code of the model's own only where `--trust-remote-code` has let its family be found."""
    return AutoConfig.from_pretrained(files.directory, trust_remote_code=family.own_class is not None)


def _model_class(config: PretrainedConfig, files: ModelFiles, family: ModelFamily, tier: Tier) -> Any:
    if family.own_class is not None:
        return get_class_from_dynamic_module(family.own_class, files.directory)
    auto_class = AutoModelForSeq2SeqLM if tier == "encoder_decoder" else AutoModelForCausalLM
    return auto_class._model_mapping[type(config)]


def resolve_dtype(
    options: EngineOptions, device: torch.device, config: PretrainedConfig, quantization: Quantization | None = None
) -> torch.dtype:
    """`--dtype`, or the model's own on an accelerator and what the processor multiplies fastest on a CPU."""
    if options.dtype is not None:
        return {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    if device.type != "cpu" and quantization is not None:
        # The type that torch's products of few bits take.
        return torch.bfloat16
    if device.type != "cpu":
        own = config.dtype
        return own if isinstance(own, torch.dtype) else torch.bfloat16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def _refuse_unloaded(model: Any) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if names:
        raise StartupError(f"no weights were found for {', '.join(names)}")


def _eos_ids(directory: Path, config: PretrainedConfig) -> frozenset[int]:
    """Every id that ends a generation: the generation config's list, else the config's."""
    path = directory / "generation_config.json"
    listed = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if listed is None:
        listed = getattr(config, "eos_token_id", None)
    if listed is None:
        return frozenset()
    return frozenset([listed] if isinstance(listed, int) else listed)
