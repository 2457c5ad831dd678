"""Reads the images of a prompt: from data URLs or, if the operator allows it, over HTTP; decodes them in a worker."""

import base64
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, repeat

from reference_server.errors import StartupError, ValidationError
from reference_server.images.chunks import Span, spans_of
from reference_server.images.fetch import ImageFetcher
from reference_server.images.markdown import ImageSource, image_of_data_url, split_prompt
from reference_server.images.placeholder import Placeholder, Pooled, Prefixed
from reference_server.images.prompt import PromptImage, PromptPart, digest_of
from reference_server.messages import Image
from reference_server.workers import JobError, JobLimitError, WorkerLimits, WorkerPool

logger = logging.getLogger(__name__)

MAX_IMAGES = 16
"""The limit of one request. Most images are so large that a context holds fewer."""
NUM_WORKERS = 2
LIMITS = WorkerLimits(time_s=10.0, memory_bytes=2 << 30, max_waiting=64)
MAX_KNOWN_SIZES = 1024


class ImageReader:
    """Reads prompts for a model with `placeholder`. token_id: of the image token. fetcher: None refuses remote images.

    pool: workers that run image_worker.py.
    """

    def __init__(self, placeholder: Placeholder, token_id: int, pool: WorkerPool, fetcher: ImageFetcher | None) -> None:
        self._placeholder = placeholder
        self._token_id = token_id
        self._pool = pool
        self._fetcher = fetcher
        self._sizes: OrderedDict[int, tuple[int, int]] = OrderedDict()

    async def start(self) -> None:
        """Start the workers; without them, prompts with images are refused."""
        try:
            await self._pool.start()
        except StartupError:
            logger.exception("could not start the image workers: images are refused")

    async def close(self) -> None:
        await self._pool.close()

    async def read(self, prompt: str) -> tuple[PromptPart, ...]:
        """The texts and images of a prompt, in order. Raises ValidationError and OverloadedError."""
        parts = list(split_prompt(prompt))
        count = sum(isinstance(part, ImageSource) for part in parts)
        if count > MAX_IMAGES:
            raise ValidationError(f"`inputs` has {count} images, but at most {MAX_IMAGES} are read")
        return tuple([part if isinstance(part, str) else await self._image(part) for part in parts])

    def text(self, parts: Iterable[PromptPart]) -> str:
        """The prompt to tokenize."""
        return self._placeholder.join(part if isinstance(part, str) else part.text for part in parts)

    def has_special_tokens(self, parts: Iterable[PromptPart]) -> bool:
        """Whether `text` has the special tokens already."""
        return isinstance(self._placeholder, Prefixed) and any(isinstance(part, PromptImage) for part in parts)

    def spans(self, ids: Sequence[int]) -> tuple[Span, ...]:
        """The images that no chunk of the prompt may cut. ids: of the prompt."""
        return spans_of(ids, self._token_id) if isinstance(self._placeholder, Pooled) else ()

    def check(self, parts: Sequence[PromptPart], ids: Sequence[int], num_truncated: int) -> None:
        """Raise ValidationError if an image token belongs to no image, or if `truncate` removed tokens of an image.

        ids: all tokens of the prompt.
        """
        named, own = ids.count(self._token_id), sum(count for _, count in self._counts(parts))
        if named != own:
            raise ValidationError(
                f"`inputs` has {named} image tokens, but its images have {own}: leave the text "
                f"`{self._placeholder.token}` out"
            )
        if self._token_id in ids[:num_truncated]:
            raise ValidationError("`truncate` cuts an image: leave it out, or put the image at the end of `inputs`")

    def prefix_ids(self, parts: Sequence[PromptPart], ids: Sequence[int]) -> tuple[int, ...]:
        """The key of the prefix cache: the tokens, with a number of the image's content for each image token.

        ids: of the prompt, with all tokens of its images.
        """
        contents = chain.from_iterable(repeat(-1 - digest_of(each.image), count) for each, count in self._counts(parts))
        return tuple(next(contents) if id_ == self._token_id else id_ for id_ in ids)

    def _counts(self, parts: Iterable[PromptPart]) -> list[tuple[PromptImage, int]]:
        """Each image with its number of image tokens."""
        token = self._placeholder.token
        return [(part, part.text.count(token)) for part in parts if isinstance(part, PromptImage)]

    async def _image(self, source: ImageSource) -> PromptImage:
        if not source.is_remote:
            image = image_of_data_url(source.url)
        elif self._fetcher is None:
            raise ValidationError("Could not fetch image: remote images are disabled")
        else:
            image = await self._fetcher.fetch(source.url)
        height, width = await self._size(image)
        return PromptImage(image, self._placeholder.text(height, width))

    async def _size(self, image: Image) -> tuple[int, int]:
        """Height and width of an image, which is decoded unless its size is cached."""
        digest = digest_of(image)
        known = self._sizes.get(digest)
        if known is None:
            known = self._sizes[digest] = await self._decoded_size(image)
        self._sizes.move_to_end(digest)
        if len(self._sizes) > MAX_KNOWN_SIZES:
            self._sizes.popitem(last=False)
        return known

    async def _decoded_size(self, image: Image) -> tuple[int, int]:
        try:
            height, width = await self._pool.run(base64.b64encode(image.data).decode())
        except JobError as error:
            raise ValidationError(f"invalid image: {error}") from error
        except JobLimitError as error:
            raise ValidationError(f"invalid image: its decoding was stopped: {error}") from error
        return height, width


def worker_pool(size: int = NUM_WORKERS, limits: WorkerLimits = LIMITS) -> WorkerPool:
    """Workers that run the jobs of image_worker.py."""
    return WorkerPool("reference_server.images.image_worker", {}, limits, size)
