"""Fill a model that was built without memory: this rank's part of each weight, from files or random."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reference_server.errors import StartupError
from reference_server.model_server.models import transformers_compat
from reference_server.model_server.models.kv_scales import is_scale
from reference_server.model_server.models.quantizer import Quantizer
from reference_server.model_server.models.transformers_compat import Conversion
from reference_server.model_server.quantization.packed_checkpoint import PackedCheckpoint
from reference_server.model_server.weights.checkpoint import Checkpoint
from reference_server.model_server.weights.cut import Cut
from reference_server.model_server.weights.random_weights import random_weight

logger = logging.getLogger(__name__)

MAX_NAMES = 8

Shapes = Mapping[str, tuple[int, ...]]


class Materializer:
    """Fills one model. `shapes`: of the whole model's weights; `cuts`: this rank's parts of the sharded ones.

    quantizer: takes the weights that are quantized.
    """

    def __init__(
        self,
        model: Any,
        shapes: Shapes,
        cuts: Mapping[str, Cut],
        dtype: torch.dtype,
        device: torch.device,
        quantizer: Quantizer | None = None,
    ) -> None:
        self._model = model
        self._shapes = shapes
        self._cuts = cuts
        self._dtype = dtype
        self._device = device
        self._quantizer = quantizer
        self._float32 = transformers_compat.float32_names(model, shapes, dtype)
        self._tied = {name: source for name, source in transformers_compat.tied_names(model).items() if name in shapes}

    def fill_random(self, seed: int) -> None:
        """Fill with random weights. Each depends only on its name and the seed: equal on all ranks and in all runs."""
        for name, parameter in list(self._model.named_parameters()):
            if name not in self._tied:
                cut = self._cuts.get(name)
                self._put(name, random_weight(name, self._shapes[name], cut, seed, parameter.dtype, self._device))
        self._tie()
        self._place_buffers()

    def fill(self, checkpoint: Checkpoint | PackedCheckpoint) -> None:
        """Fill from a checkpoint. Raises StartupError for missing, unexpected and wrongly shaped weights."""
        conversions, unexpected = transformers_compat.conversions(self._model, checkpoint.shapes)
        missing = self._missing({name for conversion in conversions for name in conversion.targets})
        problems = [*self._unexpected(unexpected, checkpoint), *_listed("missing", missing)]
        if problems:
            raise StartupError(f"the weights do not fit {type(self._model).__name__}: {'; '.join(problems)}")
        wrong = []
        for conversion in conversions:
            if self._load_quantized(conversion, checkpoint):
                continue
            for name, tensor in self._read(conversion, checkpoint).items():
                expected = self._own_shape(name)
                if tuple(tensor.shape) == expected:
                    self._put(name, self._own(name, tensor))
                else:
                    wrong.append(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
        if wrong:
            raise StartupError(f"the weights do not fit the model's config: {'; '.join(wrong[:MAX_NAMES])}")
        self._compute_missing()
        self._tie()
        self._place_buffers()

    def _compute_missing(self) -> None:
        """Fill tables of positions that are functions of their shape, which checkpoints may lack."""
        for name, parameter in list(self._model.named_parameters()):
            if parameter.is_meta and (table := transformers_compat.computed_weight(self._model, name)) is not None:
                self._put(name, self._own(name, table))

    def _load_quantized(self, conversion: Conversion, checkpoint: Checkpoint | PackedCheckpoint) -> bool:
        """Load a weight in the quantized form of the checkpoint; False if it has to be loaded dequantized."""
        if self._quantizer is None or not isinstance(checkpoint, PackedCheckpoint) or conversion.converter is not None:
            return False
        return self._quantizer.load(conversion.target, conversion.sources[0][0], checkpoint)

    def _missing(self, found: set[str]) -> list[str]:
        """Weights that the checkpoint lacks under all of their tied names."""
        covered = {self._tied.get(name, name) for name in found}
        return sorted(
            name
            for name in self._shapes
            if self._tied.get(name, name) not in covered and not transformers_compat.is_optional(self._model, name)
        )

    def _unexpected(self, names: list[str], checkpoint: Checkpoint | PackedCheckpoint) -> list[str]:
        """Report weights that the model lacks. Those outside of its modules are only logged."""
        unused = [name for name in names if not (transformers_compat.is_ignored(self._model, name) or is_scale(name))]
        if isinstance(checkpoint, PackedCheckpoint):
            unused = [name for name in unused if not checkpoint.is_empty_bias(name)]
        modules = {name for name, _ in self._model.named_modules()}
        inside = [name for name in unused if name.rpartition(".")[0] in modules]
        if outside := [name for name in unused if name not in inside]:
            logger.warning("the model does not use these weights of the checkpoint: %s", _shortened(outside))
        return _listed("unexpected", inside)

    def _read(self, conversion: Conversion, checkpoint: Checkpoint | PackedCheckpoint) -> dict[str, Tensor]:
        cut = self._cuts.get(conversion.target)
        self._check_shape(conversion, checkpoint)
        names = [name for name, _ in conversion.sources]
        source_cuts = None if cut is None else conversion.source_cuts(cut, checkpoint.shapes)
        if source_cuts is not None:
            tensors = [checkpoint.read(name, part) for name, part in zip(names, source_cuts, strict=True)]
            return conversion.convert(tensors, self._model)
        whole = conversion.convert([checkpoint.read(name) for name in names], self._model)
        return {name: self._cuts[name].take(tensor) if name in self._cuts else tensor for name, tensor in whole.items()}

    def _check_shape(self, conversion: Conversion, checkpoint: Checkpoint | PackedCheckpoint) -> None:
        """Check the whole shape of a weight that is not converted against the config."""
        name = conversion.sources[0][0]
        found, expected = checkpoint.shapes[name], self._shapes[conversion.target]
        if conversion.converter is None and found != expected:
            raise StartupError(f"weight {name} has shape {found}, but the model's config requires {expected}")

    def _own_shape(self, name: str) -> tuple[int, ...]:
        cut = self._cuts.get(name)
        return self._shapes[name] if cut is None else cut.shape(self._shapes[name])

    def _own(self, name: str, value: Tensor) -> Tensor:
        """A copy on the device, always: `value` is mapped from the file, and a view keeps the whole tensor alive."""
        dtype = self._dtype if value.is_floating_point() else value.dtype
        if name in self._float32:
            dtype = torch.float32
        return torch.empty(value.shape, dtype=dtype, device=self._device).copy_(value)

    def _put(self, name: str, value: Tensor) -> None:
        if self._quantizer is not None and self._quantizer.quantize(name, value):
            return
        parent_name, _, leaf = name.rpartition(".")
        parent = self._model.get_submodule(parent_name)
        if leaf in parent._buffers:
            parent._buffers[leaf] = value
        else:
            parent._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    def _tie(self) -> None:
        """Share tied weights. The checkpoint may have any of their names; weights that differ stay separate."""
        for name, source in self._tied.items():
            parameter = self._model.get_parameter(name)
            if self._model.get_parameter(source).is_meta and not parameter.is_meta:
                self._put(source, parameter)
        for name, source in self._tied.items():
            parameter, shared = self._model.get_parameter(name), self._model.get_parameter(source)
            if not parameter.is_meta and not torch.equal(parameter, shared):
                logger.warning("%s and %s should be tied but differ: both are kept", name, source)
                continue
            parent_name, _, leaf = name.rpartition(".")
            self._model.get_submodule(parent_name)._parameters[leaf] = shared

    def _place_buffers(self) -> None:
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._device)


def _listed(kind: str, names: list[str]) -> list[str]:
    return [f"{kind}: {_shortened(names)}"] if names else []


def _shortened(names: list[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
