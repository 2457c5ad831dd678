"""The vision half of a model with images: Transformers' image processor, vision tower and projector.

The language model is served like any other (`language_model`), with the embeddings of `VisionTower` in place
of those of image tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForCausalLM, PretrainedConfig

from reference_server.errors import StartupError
from reference_server.images.decode import decode
from reference_server.images.placeholder import WHOLE_PROMPTS, Merged, Placeholder, Pooled, VisionConfig, placeholder_of
from reference_server.json_files import read_json
from reference_server.model_server.models import transformers_compat

#: Results of image processors that are about the prompt and not for the model.
_ABOUT_PROMPTS = frozenset({"rows", "cols", "num_crops"})


class VisionTower:
    """Computes the embeddings of images. model: with its weights; its language model is not used."""

    def __init__(self, model: Any, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.placeholder: Placeholder = _placeholder(directory)
        self.token_id: int = transformers_compat.image_token_id(model.config)
        self._model = model
        self._process: Any = AutoImageProcessor.from_pretrained(directory)
        self._dtype = dtype
        self._device = device

    def embed(self, images: Sequence[bytes]) -> Tensor:
        """[image tokens of all images, hidden], from encoded images that `decode` accepts."""
        return torch.cat([self._embed(data) for data in images])

    def no_embeddings(self, count: int) -> Tensor:
        """[count, hidden], none of them finite."""
        hidden: int = text_config(self._model.config).hidden_size
        return torch.full((count, hidden), float("nan"), dtype=self._dtype, device=self._device)

    def _embed(self, data: bytes) -> Tensor:
        processed: Mapping[str, Tensor] = self._process(images=[decode(data)], return_tensors="pt")
        inputs = {name: self._placed(value) for name, value in processed.items() if name not in _ABOUT_PROMPTS}
        features = self._model.get_image_features(**inputs).pooler_output
        joined = features if isinstance(features, Tensor) else torch.cat(list(features))
        return joined.reshape(-1, joined.shape[-1])

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self._device, self._dtype if value.is_floating_point() else value.dtype)

    @property
    def has_grid(self) -> bool:
        """Whether the tokens of an image have rotary positions on a grid."""
        return isinstance(self.placeholder, Merged)

    @property
    def has_bidirectional_images(self) -> bool:
        """Whether the tokens of an image attend to all of its tokens."""
        return isinstance(self.placeholder, Pooled)

    @property
    def has_bidirectional_prompts(self) -> bool:
        """Whether the tokens of a prompt attend to all of its tokens, also without an image."""
        return self._model.config.model_type in WHOLE_PROMPTS

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of an image's tokens."""
        assert isinstance(self.placeholder, Merged), "the model has no grids"
        return self.placeholder.grid(height, width)

    def parameters(self) -> list[nn.Parameter]:
        """The weights of the tower and the projector, and those of the language model."""
        return list(self._model.parameters())


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the language model."""
    text: PretrainedConfig = config.get_text_config()
    return text


def text_class(config: PretrainedConfig) -> Any:
    """The class of the language model with its head; None if Transformers has none without a vision tower."""
    mapping = AutoModelForCausalLM._model_mapping
    text = type(text_config(config))
    return mapping.get(text, None)


def inner_language_model(model: Any) -> Any:
    """The language model in `model`, without its head."""
    return getattr(model.model, "language_model", None) or model.model.text_model


def language_model(model: Any, dtype: torch.dtype) -> Any:
    """The language model of `model` with its head: the class that serves it without images, with the same weights."""
    inner, causal_class = inner_language_model(model), text_class(model.config)
    if causal_class is None:
        return _WithHead(inner, model.get_output_embeddings())
    causal = transformers_compat.build_empty(causal_class, inner.config, dtype)
    setattr(causal, causal.base_model_prefix, inner)
    causal.set_output_embeddings(model.get_output_embeddings())
    causal.config = inner.config
    return causal.eval().requires_grad_(False)


class _WithHead(nn.Module):
    """A language model and its head, called like a causal model of Transformers."""

    base_model_prefix = "model"
    _tp_plan: Mapping[str, str] | None = None

    def __init__(self, inner: Any, head: nn.Module) -> None:
        super().__init__()
        self.model = inner
        self.lm_head = head
        self.config = inner.config

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.model.get_input_embeddings()
        return embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head

    def forward(self, logits_to_keep: int | Tensor = 0, **inputs: Any) -> SimpleNamespace:
        hidden = self.model(**inputs).last_hidden_state
        kept = hidden[:, logits_to_keep] if isinstance(logits_to_keep, Tensor) else hidden[:, -logits_to_keep:]
        return SimpleNamespace(logits=self.lm_head(kept))


def _placeholder(directory: Path) -> Placeholder:
    def read(name: str) -> dict[str, Any]:
        return read_json(directory / name) if (directory / name).is_file() else {}

    placeholder = placeholder_of(VisionConfig.read(read))
    if placeholder is None:
        raise StartupError(f"the files in {directory} do not describe the model's images: preprocessor_config.json")
    return placeholder
