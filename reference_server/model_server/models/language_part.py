"""The part of a model that is divided over shards, quantized and changed by adapters: its language model.

Most models consist of it alone. With images, it is the causal model of `vision.language_model`, which shares its
modules with the whole model under other names; vision tower and projector stay whole, in the model's dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from reference_server.model_server.models import vision

T = TypeVar("T")

EARLIER_PREFIX = "language_model.model"
"""Of the language model in the names of adapters that were made with Transformers before 4.52."""


@dataclass(frozen=True, slots=True)
class LanguagePart:
    """whole: the model as its files have it. model: its causal language model, `whole` itself if there are no images.

    inner, own_inner: names of the language model without its head, in `whole` and in `model`.
    """

    whole: Any
    model: Any
    inner: str = ""
    own_inner: str = ""

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, has_images: bool) -> "LanguagePart":
        """The part of a model that has no weights yet."""
        if not has_images:
            return cls(model, model)
        language = vision.language_model(model, dtype)
        inner = vision.inner_language_model(model)
        name = next(name for name, module in model.named_modules() if module is inner)
        return cls(model, language, name, language.base_model_prefix)

    @property
    def has_tower(self) -> bool:
        return self.model is not self.whole

    def whole_name(self, name: str) -> str:
        """The name in the whole model of a module or weight of the language model."""
        return self.inner + name.removeprefix(self.own_inner) if self._is_inside(name, self.own_inner) else name

    def own_name(self, name: str) -> str:
        """The name in the language model of a module of the whole one; unchanged outside of the language model."""
        for prefix in (self.inner, EARLIER_PREFIX):
            if self._is_inside(name, prefix):
                return self.own_inner + name.removeprefix(prefix)
        return name

    def _is_inside(self, name: str, prefix: str) -> bool:
        return self.has_tower and name.startswith(f"{prefix}.")

    def by_whole_name(self, values: Mapping[str, T]) -> dict[str, T]:
        """The values of the language model's weights."""
        return {self.whole_name(name): value for name, value in values.items()}

    def share_head(self, *, of_part: bool) -> None:
        """Give both models one head: that of the language model, or that of the whole one."""
        source, target = (self.model, self.whole) if of_part else (self.whole, self.model)
        if self.has_tower:
            target.set_output_embeddings(source.get_output_embeddings())
