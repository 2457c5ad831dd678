"""The prompt of a request as one text, with placeholders for its images."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference_server.errors import ShardError
from reference_server.images.chunks import Span, spans_of
from reference_server.images.decode import ImageError, size_of
from reference_server.images.markdown import chunks_of_flat
from reference_server.messages import Image, Request
from reference_server.model_server.models.vision import VisionTower
from reference_server.model_server.prompt_images import GridPositions, PromptImages, span_of_prompt, spans_of_images

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """images: encoded; sizes: their heights and widths. num_tokens: image tokens of the placeholders."""

    request_id: int
    text: str
    vision: VisionTower | None = None
    images: tuple[bytes, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    num_tokens: int = 0

    @classmethod
    def of(cls, request: Request, vision: VisionTower | None) -> "ExpandedPrompt":
        """Raises ShardError for an image that the model does not take or that does not decode."""
        if vision is None:
            if any(isinstance(chunk, Image) for chunk in request.chunks):
                raise ShardError(f"request {request.id} has an image, and this model takes text only")
            return cls(request.id, request.text)
        placeholder, parts, images, sizes, num_tokens = vision.placeholder, list[str](), [], [], 0
        for part in request.chunks:
            # Schema v2 has the whole prompt in one text.
            for chunk in chunks_of_flat(part) if isinstance(part, str) else (part,):
                if isinstance(chunk, str):
                    parts.append(chunk)
                    continue
                try:
                    width, height = size_of(chunk.data)
                except ImageError as error:
                    raise ShardError(f"request {request.id} has an invalid image: {error}") from error
                parts.append(placeholder.text(height, width))
                images.append(chunk.data)
                sizes.append((height, width))
                num_tokens += parts[-1].count(placeholder.token)
        return cls(request.id, placeholder.join(parts), vision, tuple(images), tuple(sizes), num_tokens)

    def images_of(self, ids: Sequence[int], count: int) -> PromptImages | None:
        """The places of the image tokens among the last `count` of the prompt's ids; None if there are none.

        Raises ShardError if the prompt has image tokens that belong to no image.
        """
        if self.vision is None or not self.images:
            return None
        tower, images, num_tokens = self.vision, self.images, self.num_tokens
        is_image = np.array(ids) == tower.token_id
        if is_image.sum() != num_tokens:
            raise ShardError(
                f"request {self.request_id} has {is_image.sum()} image tokens, but its images have {num_tokens} "
                "embeddings"
            )
        kept = is_image[len(ids) - count :]
        positions = np.flatnonzero(kept)

        def compute() -> Tensor:
            try:
                embeddings = tower.embed(images)
                assert len(embeddings) == num_tokens, f"{num_tokens} image tokens, but {len(embeddings)} embeddings"
            except Exception:
                # Other requests are in the same forward. Without finite logits, this one is dropped alone.
                logger.exception("request %d: its images could not be embedded", self.request_id)
                embeddings = tower.no_embeddings(num_tokens)
            return embeddings[num_tokens - len(positions) :]

        return PromptImages(positions, compute) if len(positions) else None

    def uncut_spans_of(self, ids: Sequence[int], count: int) -> tuple[Span, ...]:
        """The images among the last `count` of the prompt's ids that no chunk may cut."""
        if self.vision is None or not self.vision.has_bidirectional_images or not self.images:
            return ()
        return spans_of(ids[len(ids) - count :], self.vision.token_id)

    def spans_of(self, ids: Sequence[int], count: int) -> NDArray[np.int64] | None:
        """[2, count]: spans of the last `count` ids whose tokens attend to each other; None if all are causal."""
        if self.vision is None:
            return None
        if self.vision.has_bidirectional_prompts:
            return span_of_prompt(count)
        if self.vision.has_bidirectional_images and self.images:
            return spans_of_images(np.array(ids[len(ids) - count :]) == self.vision.token_id)
        return None

    def grid_of(self, ids: Sequence[int], count: int) -> GridPositions | None:
        """The rotary positions of the last `count` of the prompt's ids; None if they are the places of the tokens."""
        if self.vision is None or not self.vision.has_grid or not self.images:
            return None
        grids = (self.vision.grid(height, width) for height, width in self.sizes)
        return GridPositions.of(ids, self.vision.token_id, grids).last(count)
