"""A validated request, as the scheduler queues it."""

from dataclasses import dataclass

from reference_server.images.chunks import Span
from reference_server.images.prompt import PromptPart
from reference_server.messages import Request


@dataclass(frozen=True, slots=True)
class ValidGenerateRequest:
    """One segment of one generation.

    `wire` is the request that the shard receives, except its id and K/V blocks: those are set when it joins a batch.
    `wire.stopping.max_new_tokens` is the segment's part (segments.py) of `requested_tokens`.
    `input_ids` are the prompt's token ids, the key of the prefix cache; `truncate` removed `num_truncated` before them.
    `parts` are the texts and images of a prompt with images; `prefix_ids` is then the key of the prefix cache.
    `uncut_spans` are the images within which no chunk of the prompt may end.
    """

    wire: Request
    input_ids: tuple[int, ...]
    requested_tokens: int
    num_truncated: int = 0
    parts: tuple[PromptPart, ...] = ()
    prefix_ids: tuple[int, ...] | None = None
    uncut_spans: tuple[Span, ...] = ()

    @property
    def input_len(self) -> int:
        return len(self.input_ids)
