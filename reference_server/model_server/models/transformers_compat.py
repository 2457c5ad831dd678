"""What differs between the supported Transformers releases (5.17 to 5.23). The other files ask this one."""

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
    """No progress bars: they would be lines of noise in the log of a server."""
    transformers_logging.disable_progress_bar()


@contextmanager
def without_weight_init() -> Iterator[None]:
    """Build modules whose parameters are left as allocated; buffers are computed as always."""
    with initialization.no_init_weights():
        yield


def tensor_parallel_plan(model: Any) -> dict[str, str]:
    """Module pattern -> style, with full names; empty for a class without a plan.

    The config's plan counts for the base model only, whose prefix its patterns lack; the class's own, for the head.
    """
    base = getattr(model.config, "base_model_tp_plan", None)
    if not base:
        return {}
    prefix = model.base_model_prefix
    return {f"{prefix}.{pattern}": style for pattern, style in base.items()} | dict(type(model)._tp_plan or {})


def causal_model_types() -> Collection[str]:
    """Model types that `AutoModelForCausalLM` knows."""
    return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()  # type: ignore[no-any-return]


def seq2seq_model_types() -> Collection[str]:
    """Model types that `AutoModelForSeq2SeqLM` knows."""
    return modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys()  # type: ignore[no-any-return]


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The rope dictionary of a config; empty for a model without rotary positions."""
    return dict(getattr(config, "rope_parameters", None) or {})


def build_empty(model_class: Any, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """A model whose parameters have no memory. Its buffers do: rotary frequencies and the like are in no checkpoint."""

    def without_memory(_: object, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        with without_weight_init():
            return model_class._from_config(config, dtype=dtype)
    finally:
        hook.remove()


def float32_names(model: Any, names: Iterable[str], dtype: torch.dtype) -> set[str]:
    """Those of `names` that a class keeps in float32 whatever the model's dtype is."""
    kept = [
        pattern.replace("*", r"\d+") for pattern, own in model._get_dtype_plan(dtype).items() if own == torch.float32
    ]
    return {name for name in names if any(re.search(rf"(?:^|\.){pattern}(?:\.|$)", name) for pattern in kept)}


def tied_names(model: Any) -> dict[str, str]:
    """Names of weights that are another weight, and that one's name."""
    return dict(model.all_tied_weights_keys)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Weights of a checkpoint that become the weight `target`; `converter` None means that one does as it is.

    sources: names in the checkpoint, in order, each with the converter's pattern that it matched.
    """

    target: str
    sources: tuple[tuple[str, str | None], ...]
    converter: Any = None

    @property
    def targets(self) -> list[str]:
        """The weights that come out: one, or what a converter splits its source into."""
        if self.converter is None:
            return [self.target]
        first, *others = self.converter.target_patterns
        return [self.target, *(self.target.replace(first, other) for other in others)]

    def source_cuts(self, cut: Cut, shapes: Mapping[str, tuple[int, ...]]) -> list[Cut] | None:
        """What to read of each source for the part `cut` of the target; None where that takes the whole sources.

        Experts are stacked and then joined, which leaves every dimension but the first as it is in the sources.
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
        """The weights that tensors of the sources give, by name."""
        if self.converter is None:
            return {self.target: next(iter(tensors))}
        converter = copy.deepcopy(self.converter)
        for (name, pattern), tensor in zip(self.sources, tensors, strict=True):
            # Called when wanted: the form for reading in order.
            converter.add_tensor(self.target, name, pattern, functools.partial(_itself, tensor))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _within(cut: Cut, first: int, size: int) -> Cut:
    """What `cut` takes of the `size` entries from `first` on, seen from there, one dimension further out."""
    spans = [(max(start - first, 0), min(end - first, size)) for start, end in cut.spans]
    return Cut(cut.dim - 1, tuple((start, end) for start, end in spans if start < end))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def conversions(model: Any, names: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """How the weights `names` of a checkpoint become the model's, by Transformers' own mapping; and those it has no
    place for: old names, experts that are one tensor in memory, a prefix that is missing or too much.
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
    """Whether a checkpoint may have the weight `name` without the model having a place for it."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), *LEFT_OVER]
    return any(re.search(pattern, name) for pattern in patterns)


def is_optional(model: Any, name: str) -> bool:
    """Whether a checkpoint may lack the weight `name`."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_missing or ())


LEFT_OVER = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.(masked_bias|attn\.bias)$", r"\.(k|v|kv)_scale$")
"""Weights of older releases, and scales of a quantized cache, which nothing reads."""


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]
