"""Interfaces that differ between the supported Transformers releases (5.17 to 5.23)."""

import copy
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PretrainedConfig, conversion_mapping, core_model_loading, initialization
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging

from reference_server.model_server.weights.cut import Cut


def quiet() -> None:
    """Disable progress bars, which would fill the log."""
    transformers_logging.disable_progress_bar()


@contextmanager
def without_weight_init() -> Iterator[None]:
    """Build modules with uninitialised parameters; buffers are computed."""
    with initialization.no_init_weights():
        yield


def tensor_parallel_plan(model: Any) -> dict[str, str]:
    """Module pattern -> style, with full names; empty for a class without a plan.

    The patterns of the config's plan lack the prefix of the base model; the plan of the class is for the head.
    """
    base = getattr(model.config, "base_model_tp_plan", None)
    if not base:
        return {}
    prefix = model.base_model_prefix
    return {f"{prefix}.{pattern}": style for pattern, style in base.items()} | dict(type(model)._tp_plan or {})


def causal_model_types() -> Collection[str]:
    """Model types that `AutoModelForCausalLM` supports."""
    return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()  # type: ignore[no-any-return]


def seq2seq_model_types() -> Collection[str]:
    """Model types that `AutoModelForSeq2SeqLM` supports."""
    return modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys()  # type: ignore[no-any-return]


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The rope dictionary of a config; empty for a model without rotary positions."""
    return dict(getattr(config, "rope_parameters", None) or {})


def image_token_id(config: PretrainedConfig) -> int:
    """The id of the token that represents a part of an image."""
    names = ("image_token_id", "image_token_index")
    return next(id_ for name in names if isinstance(id_ := getattr(config, name, None), int))


def build_empty(model_class: Any, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """A model whose parameters have no memory. Buffers have, because checkpoints lack them (rotary frequencies)."""

    def without_memory(_: object, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        with without_weight_init():
            return model_class._from_config(config, dtype=dtype)
    finally:
        hook.remove()


def float32_names(model: Any, names: Iterable[str], dtype: torch.dtype) -> set[str]:
    """The names of weights that the class keeps in float32 in any dtype of the model."""
    patterns = [
        pattern.replace("*", r"\d+") for pattern, kept in model._get_dtype_plan(dtype).items() if kept == torch.float32
    ]
    return {name for name in names if any(re.search(rf"(?:^|\.){pattern}(?:\.|$)", name) for pattern in patterns)}


def tied_names(model: Any) -> dict[str, str]:
    """Tied weights: name -> name of the weight that it shares."""
    return dict(model.all_tied_weights_keys)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Weights of a checkpoint that become the weight `target`. `converter` None: one weight, unchanged.

    sources: names in the checkpoint, in order, each with the pattern of the converter that it matched.
    """

    target: str
    sources: tuple[tuple[str, str | None], ...]
    converter: Any = None

    @property
    def targets(self) -> list[str]:
        """Names of the resulting weights; several if the converter splits its source."""
        if self.converter is None:
            return [self.target]
        first, *others = self.converter.target_patterns
        return [self.target, *(self.target.replace(first, other) for other in others)]

    def source_cuts(self, cut: Cut, shapes: Mapping[str, tuple[int, ...]]) -> list[Cut] | None:
        """The part of each source for the part `cut` of the target; None if the whole sources are needed.

        Experts are stacked and then concatenated, so that all dimensions but the first equal those of the sources.
        """
        if self.converter is None:
            return [cut]
        operations = [(type(each).__name__, getattr(each, "dim", None)) for each in self.converter.operations]
        joined = operations[1][1] if len(operations) > 1 else None
        stacked = operations[0] == ("MergeModulelist", 0) and [name for name, _ in operations[1:]] in (
            [],
            ["Concatenate"],
        )
        if not stacked or cut.dim == 0 or cut.padding or len(self.converter.target_patterns) > 1:
            return None
        if joined != cut.dim:
            return [replace(cut, dim=cut.dim - 1) for _ in self.sources]
        first, firsts = 0, {}
        for pattern in self.converter.source_patterns:
            firsts[pattern] = first
            first += next(shapes[name][cut.dim - 1] for name, own in self.sources if own == pattern)
        return [_within(cut, firsts[str(pattern)], shapes[name][cut.dim - 1]) for name, pattern in self.sources]

    def convert(self, tensors: Iterable[Tensor], model: Any) -> dict[str, Tensor]:
        """Convert the tensors of the sources; returns the resulting weights by name."""
        if self.converter is None:
            return {self.target: next(iter(tensors))}
        converter = copy.deepcopy(self.converter)
        for (name, pattern), tensor in zip(self.sources, tensors, strict=True):
            # The converter expects functions that return tensors.
            converter.add_tensor(self.target, name, pattern, functools.partial(_identity, tensor))
        converted = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _within(cut: Cut, first: int, size: int) -> Cut:
    """The part of `cut` inside of `[first, first + size)`, relative to `first`, with one dimension less."""
    spans = [(max(start - first, 0), min(end - first, size)) for start, end in cut.spans]
    return Cut(cut.dim - 1, tuple((start, end) for start, end in spans if start < end))


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def conversions(model: Any, names: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """Conversions of a checkpoint's weights to the model's, by Transformers' own mapping, and the unexpected names.

    The mapping covers old names, experts stacked into one tensor, and a missing or an extra prefix.
    """
    mapping = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, core_model_loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, core_model_loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    sources: dict[str, list[tuple[str, str | None]]] = {}
    unexpected = []
    for name in sorted(names, key=_natural):
        rename = functools.partial(core_model_loading.rename_source_key, name)
        target, pattern = rename(renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = rename([], [], model.base_model_prefix, state)
        if target in state:
            sources.setdefault(target, []).append((name, pattern))
        else:
            unexpected.append(name)
    found = [
        Conversion(target, tuple(parts), None if parts[0][1] is None else by_pattern[parts[0][1]])
        for target, parts in sources.items()
    ]
    return found, unexpected


def is_ignored(model: Any, name: str) -> bool:
    """Whether the weight `name` may be in a checkpoint though the model lacks it."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), *UNUSED]
    return any(re.search(pattern, name) for pattern in patterns)


def is_optional(model: Any, name: str) -> bool:
    """Whether the weight `name` may be missing in a checkpoint."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_missing or ())


def computed_weight(model: Any, name: str) -> Tensor | None:
    """The weight `name` if its module computes it (the sinusoids of Marian and Pegasus), else None."""
    create = getattr(model.get_submodule(name.rpartition(".")[0]), "create_weight", None)
    if create is None or not is_optional(model, name):
        return None
    table: Tensor = create()
    return table


UNUSED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.(masked_bias|attn\.bias)$", r"\.(k|v|kv)_scale$")
"""Weights of older releases, and scales of a quantized cache: not read."""


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]
