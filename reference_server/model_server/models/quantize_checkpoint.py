"""A plain checkpoint made a GPTQ one: load, calibrate, round block by block, write.

What is not rounded is copied from the source, under the names that it has there.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from reference_server.errors import UnsupportedError
from reference_server.model_server.device import choose_device
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader, transformers_compat
from reference_server.model_server.models.blockwise import Blocks, round_blocks
from reference_server.model_server.models.families import find_family, max_positions
from reference_server.model_server.models.loader import ModelFiles
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.quantization import calibration
from reference_server.model_server.quantization.formats import find_format
from reference_server.model_server.quantization.gptq import GPTQSettings
from reference_server.model_server.quantization.int4 import GroupedIntegers
from reference_server.model_server.quantization.write_checkpoint import (
    WeightWriter,
    as_float16,
    copy_beside,
    gptq_tensors,
    new_directory,
    refuse_used,
    write_config,
)
from reference_server.model_server.weights.checkpoint import Checkpoint
from reference_server.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """What a model is calibrated on. text: called once the model is known to be one that can be quantized.

    window_len: tokens of a window; None takes 2048, or the model's positions where they are fewer.
    """

    text: Callable[[], str]
    num_windows: int = 128
    window_len: int | None = None
    seed: int = 0


def quantize_checkpoint(
    options: EngineOptions, output: Path, settings: GPTQSettings, calibration_set: CalibrationSet
) -> None:
    """Write the GPTQ form of a model to `output`. Raises StartupError for what cannot be quantized, and why."""
    refuse_used(output)
    files = loader.locate(options)
    raw = json.loads((files.directory / "config.json").read_text())
    _refuse(options, raw, files)
    model = _load(options, files, raw)
    blocks = Blocks.of(model, settings.bits)
    settings = _with_group_size(settings, blocks.input_sizes)
    windows = _windows(options, files, model, calibration_set)
    with new_directory(output) as directory:
        count = _write_weights(directory, model, _source(options, files, model), blocks, windows, settings)
        for source in {files.directory, files.tokenizer_directory}:
            copy_beside(source, directory)
        write_config(directory, raw, settings, blocks.name, blocks.only)
    logger.info("Quantized %d weights of %s to %d bits in %s", count, options.model_id, settings.bits, output)


def _refuse(options: EngineOptions, raw: dict[str, Any], files: ModelFiles) -> None:
    family = find_family(raw, trust_remote_code=options.trust_remote_code)
    if family.tier not in ("ragged", "padded"):
        raise UnsupportedError(
            f"{family.name} cannot be quantized: only decoders can, that hold their blocks in a list"
        )
    if (form := find_format(raw, files.directory)) is not None:
        raise UnsupportedError(f"{options.model_id} is quantized with {form.name} already: give the plain checkpoint")


def _load(options: EngineOptions, files: ModelFiles, raw: dict[str, Any]) -> Any:
    """The whole model on the CPU, in its own type, with Transformers' attention."""
    own = raw.get("dtype") or raw.get("torch_dtype")
    plain = EngineOptions(
        options.model_id,
        options.revision,
        dtype="bfloat16" if own == "bfloat16" else "float16" if own == "float16" else "float32",
        weights_override=options.weights_override,
        trust_remote_code=options.trust_remote_code,
        tier="padded",
    )
    model = loader.load(plain, files, RankGroup(0, 1), device=torch.device("cpu")).model
    # SDPA leaves a softcap out (Transformers 5.17), and not every class offers it.
    capped = getattr(model.config, "attn_logit_softcapping", None)
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    return model


def _with_group_size(settings: GPTQSettings, input_sizes: Collection[int]) -> GPTQSettings:
    """Settings whose group size is chosen, and what is to be said about it."""
    fitted = settings.fitted(input_sizes)
    size = fitted.group_size or -1
    if settings.group_size is None:
        logger.info("Groups of %s inputs", "all" if size == -1 else size)
    elif size > 0 and (uneven := [inputs for inputs in input_sizes if inputs % size]):
        logger.warning("groups of %d do not divide %d inputs: this server reads that, others may not", size, uneven[0])
    return fitted


def _windows(options: EngineOptions, files: ModelFiles, model: Any, calibration_set: CalibrationSet) -> list[list[int]]:
    length = calibration.window_len(calibration_set.window_len, max_positions(model.config))
    tokenizer = load_tokenizer(files.tokenizer_directory, trust_remote_code=options.trust_remote_code)
    text = calibration_set.text()
    windows = calibration.windows(tokenizer, text, calibration_set.num_windows, length, calibration_set.seed)
    logger.info("Calibrating on %d windows of %d tokens", len(windows), length)
    return windows


class Source(Protocol):
    """Where plain weights come from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor: ...


class DrawnWeights:
    """The weights of a model that has no files, because they were drawn at random."""

    def __init__(self, model: Any) -> None:
        tied = transformers_compat.tied_names(model)
        self._weights: dict[str, Tensor] = {
            name: weight for name, weight in model.state_dict().items() if name not in tied
        }
        self.shapes = {name: tuple(weight.shape) for name, weight in self._weights.items()}

    def read(self, name: str) -> Tensor:
        return self._weights[name]


def _source(options: EngineOptions, files: ModelFiles, model: Any) -> Source:
    if not files.has_weights:
        return DrawnWeights(model)
    return Checkpoint.open(options.weights_override or files.directory)


def _write_weights(
    directory: Path,
    model: Any,
    source: Source,
    blocks: Blocks,
    windows: Sequence[Sequence[int]],
    settings: GPTQSettings,
) -> int:
    """Round what is to be rounded, copy the rest; how many weights were rounded."""
    conversions, _ = transformers_compat.conversions(model, source.shapes)
    own_names = {each.target: each.sources[0][0] for each in conversions}
    wide = transformers_compat.float32_names(model, own_names, torch.float16)
    writer = WeightWriter(directory)
    rounded: set[str] = set()

    def take(path: str, weight: GroupedIntegers) -> None:
        name = own_names[f"{path}.weight"]
        rounded.add(name)
        for leaf, tensor in gptq_tensors(weight).items():
            writer.add(f"{name.removesuffix('weight')}{leaf}", tensor)

    round_blocks(model, blocks, windows, settings, choose_device(), take)
    for conversion in conversions:
        for name, _ in conversion.sources:
            if name not in rounded:
                tensor = source.read(name)
                writer.add(name, tensor.float() if conversion.target in wide else as_float16(name, tensor))
    writer.finish()
    return len(rounded)
