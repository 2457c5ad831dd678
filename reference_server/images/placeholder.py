"""The text that stands for an image in a prompt, by model family: as many image tokens as the image has embeddings.

Pure. Router and model server both expand prompts with it; the model server compares the tokens with the embeddings.
Source: the processors of Transformers, on which the tests compare every family.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Config = Mapping[str, Any]
"""Contents of a JSON file."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The files of a model that describe its images; empty where missing.

    model: config.json. processor: preprocessor_config.json, or what processor_config.json has about images.
    prompts: the other content of processor_config.json.
    """

    model: Config
    processor: Config
    prompts: Config

    @classmethod
    def read(cls, read_json: Callable[[str], Config]) -> "VisionConfig":
        """read_json: returns the content of a file of the model, empty if it is missing."""
        prompts = read_json("processor_config.json")
        processor = read_json("preprocessor_config.json") or prompts.get("image_processor") or {}
        return cls(read_json("config.json"), processor, prompts)


class Placeholder(Protocol):
    """How one model's images stand in its prompts. `token` is the text of the image token."""

    @property
    def token(self) -> str: ...

    def text(self, height: int, width: int) -> str:
        """The text of an image of this size, in pixels."""
        ...

    def join(self, parts: Iterable[str]) -> str:
        """The prompt of these texts and placeholders, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Tiled:
    """LLaVA-Next: the whole image, then its tiles without padding and a token after each row of patches.

    grids: sizes of images made of tiles, as (height, width). tile, patch: sides in pixels.
    """

    grids: tuple[tuple[int, int], ...]
    tile: int
    patch: int
    token: str = "<image>"

    @classmethod
    def of(cls, config: VisionConfig) -> "Tiled":
        vision = config.model["vision_config"]
        grids = config.processor.get("image_grid_pinpoints") or config.model["image_grid_pinpoints"]
        return cls(
            tuple((int(height), int(width)) for height, width in grids),
            # The defaults of CLIP, which a config leaves out.
            int(vision.get("image_size", 224)),
            int(vision.get("patch_size", 32)),
        )

    def text(self, height: int, width: int) -> str:
        return self.token * self.num_tokens(height, width)

    def num_tokens(self, height: int, width: int) -> int:
        """Embeddings of an image.

        >>> Tiled(((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)), 336, 14).num_tokens(640, 640)
        2928
        """
        side = self.tile // self.patch
        grid_height, grid_width = self._best_grid(height, width)
        rows, columns = side * (grid_height // self.tile), side * (grid_width // self.tile)
        # The image fills one dimension of the grid; half of the padding of the other is cut at each end.
        if width * rows > height * columns:
            rows -= 2 * ((rows - int(round(height * (columns / width), 7))) // 2)
        else:
            columns -= 2 * ((columns - int(round(width * (rows / height), 7))) // 2)
        return side * side + rows * columns + rows

    def _best_grid(self, height: int, width: int) -> tuple[int, int]:
        """The grid that keeps most pixels of the image and, of several, wastes least."""

        def merit(grid: tuple[int, int]) -> tuple[int, int]:
            scale = min(grid[0] / height, grid[1] / width)
            kept = min(int(height * scale) * int(width * scale), height * width)
            return kept, kept - grid[0] * grid[1]

        return max(self.grids, key=merit)

    def join(self, parts: Iterable[str]) -> str:
        return "".join(parts)


FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"
MAX_SIDE = 4096
"""Longest side to which Idefics 3 enlarges an image."""


@dataclass(frozen=True, slots=True)
class Resampled:
    """Idefics 2: as many tokens for each image as the resampler has latents, between two marks."""

    latents: int
    crops: int
    token: str = "<image>"

    @classmethod
    def of(cls, config: VisionConfig) -> "Resampled":
        perceiver = config.model.get("perceiver_config") or {}
        return cls(
            int(perceiver.get("resampler_n_latents", 64)), 5 if config.processor.get("do_image_splitting") else 1
        )

    def text(self, height: int, width: int) -> str:  # noqa: ARG002
        return f"{FAKE}{self.token * self.latents}{FAKE}" * self.crops

    def join(self, parts: Iterable[str]) -> str:
        """One mark between images, and a space between a mark and a word."""
        joined = "".join(parts).replace(FAKE * 2, FAKE)
        return re.sub(rf"{FAKE}(?=[^\s<])", f"{FAKE} ", joined)


@dataclass(frozen=True, slots=True)
class Split:
    """Idefics 3 and SmolVLM: a large image is enlarged and cut into tiles in rows and columns, the whole image follows.

    longest, tile: sides in pixels. patches: tokens of a tile. is_split: else every image is one tile.
    """

    longest: int
    tile: int
    patches: int
    is_split: bool
    token: str = "<image>"

    @classmethod
    def of(cls, config: VisionConfig) -> "Split":
        tile = int(config.processor["max_image_size"]["longest_edge"])
        side = tile // int(config.model["vision_config"].get("patch_size", 32))
        return cls(
            longest=int(config.processor["size"]["longest_edge"]),
            tile=tile,
            patches=side * side // int(config.model.get("scale_factor", 2)) ** 2,
            is_split=bool(config.processor.get("do_image_splitting", True)),
        )

    def text(self, height: int, width: int) -> str:
        rows, columns = self._grid(height, width) if self.is_split else (1, 1)
        tokens = self.token * self.patches
        whole = f"{FAKE}{GLOBAL}{tokens}{FAKE}"
        if rows == columns == 1:
            return whole
        lines = (
            "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return f"{''.join(lines)}\n{whole}"

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles. Computed for the longer side first, and rounded as the image is resized."""
        is_wide = width >= height
        long, short = (width, height) if is_wide else (height, width)
        long, short = self.longest, _scaled(self.longest, long, short, is_wide)
        short = max(1, short + short % 2)
        if long > MAX_SIDE:
            long, short = MAX_SIDE, max(1, _scaled(MAX_SIDE, long, short, is_wide))
        along = -(-long // self.tile)
        across = max(1, -(-_scaled(along * self.tile, long, short, is_wide) // self.tile))
        return (across, along) if is_wide else (along, across)

    def join(self, parts: Iterable[str]) -> str:
        return "".join(parts)


def _scaled(length: int, long: int, short: int, is_wide: bool) -> int:
    """The shorter side of an image whose longer side becomes `length`. Rounded like the quotient of the processor."""
    ratio = long / short if is_wide else short / long
    return int(length / ratio if is_wide else length * ratio)


@dataclass(frozen=True, slots=True)
class Merged:
    """Qwen2-VL: patches at about the image's own size, a square of them merged into each token.

    side: of the pixels that become one token. least, most: pixels of a resized image.
    """

    side: int
    least: int
    most: int
    token: str = "<|image_pad|>"

    @classmethod
    def of(cls, config: VisionConfig) -> "Merged":
        processor = config.processor
        size = processor.get("size") or {}
        least = processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        side = int(processor.get("patch_size", 14)) * int(processor.get("merge_size", 2))
        return cls(side, int(least), int(most))

    def text(self, height: int, width: int) -> str:
        rows, columns = self.grid(height, width)
        return f"<|vision_start|>{self.token * (rows * columns)}<|vision_end|>"

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens."""
        side = self.side
        rows, columns = round(height / side), round(width / side)
        pixels = rows * columns * side * side
        if pixels > self.most:
            shrink = math.sqrt(height * width / self.most)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif pixels < self.least:
            enlarge = math.sqrt(self.least / (height * width))
            rows, columns = math.ceil(height * enlarge / side), math.ceil(width * enlarge / side)
        return rows, columns

    def join(self, parts: Iterable[str]) -> str:
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Pooled:
    """Gemma 3: as many tokens for each image as its projector pools, which attend to each other in both directions."""

    count: int
    token: str = "<image_soft_token>"

    @classmethod
    def of(cls, config: VisionConfig) -> "Pooled":
        if config.processor.get("do_pan_and_scan"):
            raise ValueError("crops of an image are not served")
        return cls(int(config.model.get("mm_tokens_per_image", 256)))

    def text(self, height: int, width: int) -> str:  # noqa: ARG002
        return f"\n\n<start_of_image>{self.token * self.count}<end_of_image>\n\n"

    def join(self, parts: Iterable[str]) -> str:
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Prefixed:
    """PaliGemma: as many tokens for each image as it has patches; the start token after the last image, a newline last.

    Tokenize such a prompt without special tokens.
    """

    count: int
    token: str = "<image>"

    @classmethod
    def of(cls, config: VisionConfig) -> "Prefixed":
        vision = config.model["vision_config"]
        return cls((int(vision.get("image_size", 224)) // int(vision.get("patch_size", 14))) ** 2)

    def text(self, height: int, width: int) -> str:  # noqa: ARG002
        return self.token * self.count

    def join(self, parts: Iterable[str]) -> str:
        head, image, tail = "".join(parts).rpartition(self.token)
        return f"{head}{image}<bos>{tail}\n" if image else tail


PLACEHOLDERS: Mapping[str, Callable[[VisionConfig], Placeholder]] = {
    "llava_next": Tiled.of,
    "idefics2": Resampled.of,
    "idefics3": Split.of,
    "smolvlm": Split.of,
    "qwen2_vl": Merged.of,
    "qwen2_5_vl": Merged.of,
    "gemma3": Pooled.of,
    "paligemma": Prefixed.of,
}
"""By `model_type`: the families whose images are served."""

WHOLE_PROMPTS = frozenset({"paligemma"})
"""By `model_type`: the families whose prompt tokens all attend to each other.

No part of a prompt can be computed before the rest is known, and generated tokens cannot become part of a prompt.
"""


def placeholder_of(config: VisionConfig) -> Placeholder | None:
    """The placeholders of a model; None if it takes no images, or its files do not describe them."""
    make = PLACEHOLDERS.get(str(config.model.get("model_type")))
    try:
        return None if make is None else make(config)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
