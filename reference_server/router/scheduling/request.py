"""A validated request, as the scheduler queues it."""

from dataclasses import dataclass

from reference_server.messages import Request


@dataclass(frozen=True, slots=True)
class ValidGenerateRequest:
    """One segment of one generation.

    `wire` is the request that the shard receives, except its id and K/V blocks: those are set when it joins a batch.
    `wire.stopping.max_new_tokens` is the segment's part (segments.py) of `requested_tokens`.
    `input_ids` are the prompt's token ids, the key of the prefix cache; `truncate` removed `num_truncated` before them.
    """

    wire: Request
    input_ids: tuple[int, ...]
    requested_tokens: int
    num_truncated: int = 0

    @property
    def input_len(self) -> int:
        return len(self.input_ids)
