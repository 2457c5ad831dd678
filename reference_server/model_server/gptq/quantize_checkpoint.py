"""Make a GPTQ checkpoint of a plain one: load, calibrate, round block by block, write.

Weights that are not rounded are copied from the source under their own names.
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
from reference_server.model_files import ModelPaths
from reference_server.model_server.device import choose_device
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.gptq import calibration
from reference_server.model_server.gptq.blockwise import Blocks, round_blocks
from reference_server.model_server.gptq.round_weight import GPTQSettings
from reference_server.model_server.gptq.write_checkpoint import (
    WeightWriter,
    as_float16,
    copy_beside,
    gptq_tensors,
    new_directory,
    refuse_used,
    write_config,
)
from reference_server.model_server.models import loader, transformers_compat
from reference_server.model_server.models.families import find_family, max_positions
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.quantization.formats import find_format
from reference_server.model_server.quantization.int4 import GroupedIntegers
from reference_server.model_server.weights.checkpoint import Checkpoint
from reference_server.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """The calibration text and its windows. text: called after the model has been accepted.

    window_len: tokens of a window; None: 2048, or the positions of the model if fewer.
    """

    text: Callable[[], str]
    num_windows: int = 128
    window_len: int | None = None
    seed: int = 0


def quantize_checkpoint(
    options: EngineOptions, output: Path, settings: GPTQSettings, calibration_set: CalibrationSet
) -> None:
    """Write a GPTQ checkpoint of a model to `output`. Raises StartupError if the model cannot be quantized."""
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
        write_config(directory, raw, settings, blocks.name, blocks.linears_in_block)
    logger.info("Quantized %d weights of %s to %d bits in %s", count, options.model_id, settings.bits, output)


def _refuse(options: EngineOptions, raw: dict[str, Any], files: ModelPaths) -> None:
    family = find_family(raw, trust_remote_code=options.trust_remote_code)
    if family.tier not in ("ragged", "padded"):
        raise UnsupportedError(f"{family.name} cannot be quantized: only decoders with a list of blocks can")
    if (form := find_format(raw, files.directory)) is not None:
        raise UnsupportedError(f"{options.model_id} is already quantized with {form.name}: use the plain checkpoint")


def _load(options: EngineOptions, files: ModelPaths, raw: dict[str, Any]) -> Any:
    """Load the whole model on the CPU, in the dtype of its config, with Transformers' attention."""
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    load_options = EngineOptions(
        options.model_id,
        options.revision,
        dtype=dtype if dtype in ("bfloat16", "float16") else "float32",
        weights_override=options.weights_override,
        trust_remote_code=options.trust_remote_code,
        tier="padded",
    )
    model = loader.load(load_options, files, RankGroup(0, 1), device=torch.device("cpu")).model
    # SDPA ignores a softcap (Transformers 5.17), and some classes do not support SDPA.
    capped = getattr(model.config, "attn_logit_softcapping", None)
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    return model


def _with_group_size(settings: GPTQSettings, input_sizes: Collection[int]) -> GPTQSettings:
    """Settings with a group size; logs the choice, or a group size that other readers may not support."""
    fitted = settings.fitted(input_sizes)
    size = fitted.group_size or -1
    if settings.group_size is None:
        logger.info("Groups of %s inputs", "all" if size == -1 else size)
    elif size > 0 and (uneven := [inputs for inputs in input_sizes if inputs % size]):
        logger.warning(
            "%d inputs are not a multiple of the group size %d: other servers may not load this", uneven[0], size
        )
    return fitted


def _windows(options: EngineOptions, files: ModelPaths, model: Any, calibration_set: CalibrationSet) -> list[list[int]]:
    length = calibration.window_len(calibration_set.window_len, max_positions(model.config))
    tokenizer = load_tokenizer(files.tokenizer_directory, trust_remote_code=options.trust_remote_code)
    text = calibration_set.text()
    windows = calibration.windows(tokenizer, text, calibration_set.num_windows, length, calibration_set.seed)
    logger.info("Calibrating on %d windows of %d tokens", len(windows), length)
    return windows


class WeightSource(Protocol):
    """A source of plain weights."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor: ...


class RandomWeights:
    """The weights of a model with random weights, which has no files."""

    def __init__(self, model: Any) -> None:
        tied = transformers_compat.tied_names(model)
        self._weights: dict[str, Tensor] = {
            name: weight for name, weight in model.state_dict().items() if name not in tied
        }
        self.shapes = {name: tuple(weight.shape) for name, weight in self._weights.items()}

    def read(self, name: str) -> Tensor:
        return self._weights[name]


def _source(options: EngineOptions, files: ModelPaths, model: Any) -> WeightSource:
    if not files.has_weights:
        return RandomWeights(model)
    return Checkpoint.open(options.weights_override or files.directory)


def _write_weights(
    directory: Path,
    model: Any,
    source: WeightSource,
    blocks: Blocks,
    windows: Sequence[Sequence[int]],
    settings: GPTQSettings,
) -> int:
    """Write rounded and copied weights; returns the number of rounded weights."""
    conversions, _ = transformers_compat.conversions(model, source.shapes)
    source_names = {each.target: each.sources[0][0] for each in conversions}
    kept_in_float32 = transformers_compat.float32_names(model, source_names, torch.float16)
    writer = WeightWriter(directory)
    rounded: set[str] = set()

    def write(path: str, weight: GroupedIntegers) -> None:
        name = source_names[f"{path}.weight"]
        rounded.add(name)
        for leaf, tensor in gptq_tensors(weight).items():
            writer.add(f"{name.removesuffix('weight')}{leaf}", tensor)

    round_blocks(model, blocks, windows, settings, choose_device(), write)
    for conversion in conversions:
        for name, _ in conversion.sources:
            if name not in rounded:
                tensor = source.read(name)
                writer.add(name, tensor.float() if conversion.target in kept_in_float32 else as_float16(name, tensor))
    writer.finish()
    return len(rounded)
