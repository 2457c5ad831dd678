"""A request that passed validation: what the HTTP side hands to the scheduler."""

from dataclasses import dataclass

from reference_server.messages import ChooserParameters, InputChunk, StoppingParameters


@dataclass(frozen=True, slots=True)
class ValidGenerateRequest:
    """One scheduling segment of one generation; nothing optional that has a default.

    `input_ids` are the prompt's last `input_len` token ids, after truncation: the prefix-cache key.
    `stopping.max_new_tokens` is this segment's share, at most 1,024 (segments.py); `requested_tokens` is the whole.
    """

    chunks: tuple[InputChunk, ...]
    input_ids: tuple[int, ...]
    truncate: int
    parameters: ChooserParameters
    stopping: StoppingParameters
    requested_tokens: int
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    add_special_tokens: bool = True
    adapter_id: str | None = None

    @property
    def input_len(self) -> int:
        return len(self.input_ids)
