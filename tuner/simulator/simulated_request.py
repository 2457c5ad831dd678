"""The request that the router's scheduler gets for a simulated one: its lengths, and its token ids."""

from functools import lru_cache

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.router.scheduling.request import ValidGenerateRequest
from reference_server.router.scheduling.segments import segment_tokens
from tuner.simulator.replica_state import Flight

_CHOOSER = ChooserParameters()
_CHUNKS = ("",)
_same_ids = lru_cache(maxsize=4096)(lambda length: (0,) * length)


def request_of(flight: Flight, *, with_ids: bool) -> ValidGenerateRequest:
    """The next segment of a request. with_ids: ids of its own, because prompts can share prefixes."""
    requested = flight.declared_tokens - flight.generated
    input_len = flight.input_tokens + flight.generated
    ids = _ids_with_output(flight, input_len) if with_ids else _same_ids(input_len)
    return ValidGenerateRequest(_wire(input_len, segment_tokens(requested)), ids, requested)


@lru_cache(maxsize=4096)
def _wire(input_len: int, max_new_tokens: int) -> Request:
    return Request(0, _CHUNKS, input_len, _CHOOSER, StoppingParameters(max_new_tokens))


def _ids_with_output(flight: Flight, input_len: int) -> tuple[int, ...]:
    """The prompt's ids, followed by unique ids for the generated tokens."""
    ids = flight.ids
    if ids is None:
        first = (flight.id + 1) << 24
        return tuple(range(first, first + input_len))
    if len(ids) < input_len:
        first = (flight.id + 1) << 24
        ids = (*ids, *range(first + len(ids), first + input_len))
    return ids
