"""The liveness probe of a shard: one forward of one token."""

from reference_server.messages import (
    Batch,
    ChooserParameters,
    Request,
    StoppingParameters,
)

LIVENESS_ID = 2**64 - 1
"""Batch id and request id of the liveness probe."""


def liveness_batch() -> Batch:
    """One token of one request, in block 0, which no other request uses."""
    request = Request(
        id=LIVENESS_ID,
        chunks=("liveness",),
        truncate=1,
        parameters=ChooserParameters(),
        stopping=StoppingParameters(max_new_tokens=1),
        blocks=(0,),
        num_slots=1,
        add_special_tokens=False,
    )
    return Batch(id=LIVENESS_ID, requests=(request,), max_tokens=2, max_blocks=1)
