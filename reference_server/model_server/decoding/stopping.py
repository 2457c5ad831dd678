"""Ends a generation by length, by an end-of-sequence token or by a stop string in the streamed text."""

from collections.abc import Set

from reference_server.messages import FinishReason, StoppingParameters

# TGI cuts its buffer to the last 200 characters once it exceeds 300.
_TAIL_KEPT, _TAIL_LIMIT = 200, 300


class StoppingCriteria:
    """The stopping state of one request. num_tokens: tokens counted so far."""

    def __init__(self, parameters: StoppingParameters, eos_ids: Set[int]) -> None:
        self._max_new_tokens = parameters.max_new_tokens
        self._min_new_tokens = parameters.min_new_tokens
        self._eos_ids: Set[int] = frozenset() if parameters.ignore_eos_token else eos_ids
        self._suffixes = tuple(text for stop in parameters.stop_sequences for text in (stop, stop + "\n"))
        self._tail_kept = max(_TAIL_KEPT, max(map(len, self._suffixes), default=0))
        self._tail = ""
        self.num_tokens = 0

    @property
    def remaining_tokens(self) -> int:
        return self._max_new_tokens - self.num_tokens

    def finish_reason(self, token_id: int, text: str) -> FinishReason | None:
        """Count one token; returns why the generation ends with it, or None. Call it once per token.

        text: the token's part of the stream. A stop string is found if the text ends with it, or with it and one
        newline; a token whose text continues after the stop string does not end the generation.
        """
        self.num_tokens += 1
        if self.num_tokens >= self._max_new_tokens:
            return FinishReason.LENGTH
        if token_id in self._eos_ids:
            return FinishReason.EOS_TOKEN
        if self._suffixes and self._ends_with_stop_string(text):
            return FinishReason.STOP_SEQUENCE
        return None

    def _ends_with_stop_string(self, text: str) -> bool:
        self._tail += text
        if len(self._tail) > max(_TAIL_LIMIT, self._tail_kept):
            self._tail = self._tail[-self._tail_kept :]
        return self.num_tokens >= self._min_new_tokens and self._tail.endswith(self._suffixes)
