"""Tiny random models with images, saved like checkpoints, and Transformers' own results for prompts with images."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedModel

from reference_server.images.placeholder import Placeholder, VisionConfig, placeholder_of

WORDS = 100
EOS = "</s>"
MARKS = ("<fake_token_around_image>", "<global-img>", *(f"<row_{n}_col_{m}>" for n in (1, 2) for m in (1, 2)))
SPECIAL = (EOS, "<image>", *MARKS, "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<image_soft_token>",
           "<start_of_image>", "<end_of_image>", "<bos>")  # fmt: skip
VOCAB_SIZE = 128
ID_OF = {token: WORDS + number for number, token in enumerate(SPECIAL)}

_TEXT = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
_HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


@dataclass(frozen=True)
class VisionModel:
    """config: of the model. processor: content of preprocessor_config.json."""

    config: dict[str, Any]
    processor: dict[str, Any]


_IDEFICS_TOWER = {"image_size": 32, "patch_size": 8, **_TOWER}
_IDEFICS3 = {
    "text_config": {"model_type": "llama", **_TEXT},
    "image_token_id": ID_OF["<image>"],
    "scale_factor": 2,
    "pad_token_id": None,
}
_IDEFICS3_PROCESSOR = {
    "size": {"longest_edge": 64},
    "max_image_size": {"longest_edge": 32},
    "do_image_splitting": True,
    **_HALVES,
}
_QWEN = {
    "text_config": {
        **_TEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
    },
    "image_token_id": ID_OF["<|image_pad|>"],
    "vision_start_token_id": ID_OF["<|vision_start|>"],
    "vision_end_token_id": ID_OF["<|vision_end|>"],
}
_QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 256,
    "max_pixels": 1024,
    **_HALVES,
}
_PALIGEMMA = {
    "model_type": "paligemma",
    # With tied embeddings a random model repeats its last token, whatever the image.
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "siglip_vision_model", **_TOWER, "image_size": 16, "patch_size": 4, "vision_use_head": False,
    },
    "projection_dim": 48,
    "hidden_size": 48,
    "image_token_index": ID_OF["<image>"],
}  # fmt: skip
_PALIGEMMA_PROCESSOR = {
    "image_processor_type": "SiglipImageProcessor", "image_seq_length": 16, "size": {"height": 16, "width": 16},
    **_HALVES,
}  # fmt: skip
_GRIDS = [[16, 32], [32, 16], [32, 32]]

VISION_MODELS = {
    "llava-next": VisionModel(
        {
            "model_type": "llava_next",
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "clip_vision_model", **_TOWER, "image_size": 16, "patch_size": 4},
            "image_grid_pinpoints": _GRIDS,
            "image_token_index": ID_OF["<image>"],
            "projector_hidden_act": "gelu",
        },
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
            "image_grid_pinpoints": _GRIDS,
            **_HALVES,
        },
    ),
    "idefics2": VisionModel(
        {
            "model_type": "idefics2",
            "text_config": {"model_type": "mistral", **_TEXT},
            "vision_config": {"model_type": "idefics2_vision", **_IDEFICS_TOWER},
            "perceiver_config": {
                "model_type": "idefics2_perceiver",
                "hidden_size": 48,
                "resampler_n_latents": 20,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 1,
            },
            "image_token_id": ID_OF["<image>"],
        },
        {
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"shortest_edge": 16, "longest_edge": 32},
            "do_image_splitting": False,
            **_HALVES,
        },
    ),
    "idefics3": VisionModel(
        {"model_type": "idefics3", "vision_config": {"model_type": "idefics3_vision", **_IDEFICS_TOWER}, **_IDEFICS3},
        {"image_processor_type": "Idefics3ImageProcessor", **_IDEFICS3_PROCESSOR},
    ),
    "smolvlm": VisionModel(
        {"model_type": "smolvlm", "vision_config": {"model_type": "smolvlm_vision", **_IDEFICS_TOWER}, **_IDEFICS3},
        {"image_processor_type": "SmolVLMImageProcessor", **_IDEFICS3_PROCESSOR},
    ),
    "qwen2-vl": VisionModel(
        {
            "model_type": "qwen2_vl",
            "vision_config": {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2, **_QWEN_TOWER},
            **_QWEN,
        },
        _QWEN_PROCESSOR,
    ),
    "qwen2.5-vl": VisionModel(
        {
            "model_type": "qwen2_5_vl",
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "out_hidden_size": 48,
                "window_size": 16,
                "fullatt_block_indexes": [1],
                **_QWEN_TOWER,
            },
            **_QWEN,
        },
        _QWEN_PROCESSOR,
    ),
    "gemma3": VisionModel(
        {
            "model_type": "gemma3",
            # With tied embeddings a random model repeats its last token, whatever the image.
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "gemma3_text",
                **_TEXT,
                "head_dim": 16,
                "query_pre_attn_scalar": 20,
                # Releases of Transformers differ in images that are longer than the window.
                "sliding_window": 256,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "image_size": 16, "patch_size": 2},
            "mm_tokens_per_image": 16,
            "image_token_index": ID_OF["<image_soft_token>"],
            "boi_token_index": ID_OF["<start_of_image>"],
            "eoi_token_index": ID_OF["<end_of_image>"],
        },
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}, **_HALVES},
    ),
    "paligemma": VisionModel(
        {**_PALIGEMMA, "text_config": {"model_type": "gemma", **_TEXT, "head_dim": 16}}, _PALIGEMMA_PROCESSOR
    ),
    "paligemma2": VisionModel(
        {
            **_PALIGEMMA,
            # The prompts are longer than the window.
            "text_config": {"model_type": "gemma2", **_TEXT, "head_dim": 16, "sliding_window": 12},
        },
        _PALIGEMMA_PROCESSOR,
    ),
}


@dataclass(frozen=True)
class SavedVisionModel:
    """A model and the directory of its checkpoint. model: None if nothing is to be generated."""

    directory: Path
    model: Any

    @property
    def placeholder(self) -> Placeholder:
        found = placeholder_of(VisionConfig.read(lambda name: _read(self.directory / name)))
        assert found is not None
        return found

    def expanded(self, parts: Sequence[str | bytes]) -> str:
        """The prompt with placeholders for its images."""
        texts = []
        for part in parts:
            if isinstance(part, bytes):
                width, height = Image.open(io.BytesIO(part)).size
                part = self.placeholder.text(height, width)
            texts.append(part)
        return self.placeholder.join(texts)

    def prompt_ids(self, parts: Sequence[str | bytes]) -> list[int]:
        ids: list[int] = Tokenizer.from_file(str(self.directory / "tokenizer.json")).encode(self.expanded(parts)).ids
        return ids

    @torch.no_grad()
    def generate(self, parts: Sequence[str | bytes], max_new_tokens: int, guess: list[int] | None = None) -> list[int]:
        """Ids of Transformers' own greedy generation, end-of-sequence ignored.

        guess: the probable result, which one forward confirms in less time.
        """
        ids = self.prompt_ids(parts)
        images = [Image.open(io.BytesIO(part)).convert("RGB") for part in parts if isinstance(part, bytes)]
        model_type = self.model.config.model_type
        inputs: dict[str, Any] = {}
        if model_type == "paligemma":
            inputs["token_type_ids"] = torch.zeros((1, len(ids)), dtype=torch.long)
        if images:
            # One prompt's images are a list of their own for the families whose prompts may have different numbers.
            nested = [images] if model_type in ("idefics2", "idefics3", "smolvlm") else images
            inputs |= dict(self._processor(images=nested, return_tensors="pt"))
            inputs.pop("num_crops", None)
            pad = ID_OF[self.placeholder.token]
            kinds = torch.tensor([[int(id_ == pad) for id_ in ids]])
            if model_type.startswith("qwen"):
                inputs["mm_token_type_ids"] = kinds
            if model_type == "gemma3":
                inputs["token_type_ids"] = kinds
        if guess and len(guess) == max_new_tokens and self._is_greedy(ids, guess, inputs):
            return guess
        output = self.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **inputs,
        )
        generated: list[int] = output[0, len(ids) :].tolist()
        return generated

    def _is_greedy(self, prompt: list[int], ids: list[int], inputs: dict[str, Any]) -> bool:
        """Whether each id is the best one after those before it, in one forward. inputs: of the prompt."""
        # In one forward, PaliGemma's tokens attend to later ones, and a generated placeholder stands for an image.
        if self.model.config.model_type == "paligemma" or ID_OF[self.placeholder.token] in ids:
            return False
        known = torch.tensor([[*prompt, *ids[:-1]]])
        kinds = {name: F.pad(value, (0, len(ids) - 1)) for name, value in inputs.items() if "token_type" in name}
        logits = self.model(input_ids=known, use_cache=False, **inputs | kinds).logits[0, -len(ids) :]
        return bool(logits.argmax(-1).tolist() == ids)

    @cached_property
    def _processor(self) -> Any:
        return AutoImageProcessor.from_pretrained(self.directory)


def save_vision_model(directory: Path, name: str) -> SavedVisionModel:
    """Build the model of `VISION_MODELS` with random weights and save it with processor and tokenizer."""
    described = VISION_MODELS[name]
    ids = {"bos_token_id": 0, "eos_token_id": ID_OF[EOS], "pad_token_id": None}
    settings = {**described.config, "text_config": {**described.config["text_config"], **ids}}
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(**settings), dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 and (parameter == 1).all() else 0.15 * noise)
    model.eval().save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(described.processor))
    _save_tokenizer(directory)
    return SavedVisionModel(directory, model)


def picture(height: int, width: int, seed: int = 0, form: str = "PNG") -> bytes:
    """An encoded image of nine coloured fields, which no resizing averages away."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(file, form)
    return file.getvalue()


def _save_tokenizer(directory: Path) -> None:
    """`w7 w3` is the ids 7, 3; special tokens need no spaces around them."""
    vocab = {f"w{id_}": id_ for id_ in range(WORDS)} | ID_OF
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": EOS, "model_max_length": 512, "tokenizer_class": "PreTrainedTokenizerFast"}
    settings["chat_template"] = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
