"""Validated requests of given lengths, for the scheduler."""

from collections.abc import Sequence
from itertools import count

from reference_server.messages import ChooserParameters, InputChunk, Request, StoppingParameters
from reference_server.router.scheduling.request import ValidGenerateRequest

_fresh_token = count(1_000_000, 1_000_000)


def valid_request(
    input_len: int,
    max_new_tokens: int,
    *,
    ids: Sequence[int] | None = None,
    chunks: tuple[InputChunk, ...] = ("prompt",),
    prefill_logprobs: bool = False,
    adapter_id: str | None = None,
    top_n_tokens: int = 0,
) -> ValidGenerateRequest:
    """A request whose prompt shares no token with other requests, unless `ids` are given."""
    first = next(_fresh_token)
    wire = Request(
        id=0,
        chunks=chunks,
        truncate=input_len,
        parameters=ChooserParameters(),
        stopping=StoppingParameters(max_new_tokens),
        prefill_logprobs=prefill_logprobs,
        adapter_id=adapter_id,
        top_n_tokens=top_n_tokens,
    )
    input_ids = tuple(range(first, first + input_len) if ids is None else ids)
    return ValidGenerateRequest(wire, input_ids, requested_tokens=max_new_tokens)
