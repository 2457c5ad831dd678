"""The calls of the Scheduler to a shard, and the output of their replies."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from reference_server.messages import Batch, CachedBatch, Generation
from reference_server.router.scheduling.queue import Entry


class ConcatReason(StrEnum):
    """Why a new batch joins a running one; the label of the metric `tgi_batch_concat`."""

    BACKPRESSURE = "backpressure"
    WAIT_EXCEEDED = "wait_exceeded"
    CHUNKING = "chunking"


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill new requests; with `cached`, merge them into that running batch. `reason` is set if a batch runs."""

    batch: Batch
    entries: tuple[Entry, ...]
    cached: CachedBatch | None = None
    reason: ConcatReason | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """One more forward over the running batch; several batches are merged into the first."""

    batches: tuple[CachedBatch, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """Keep only these requests of a batch; the others have ended."""

    batch_id: int
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Clear:
    """Drop a batch without live requests, or with `after_error` one that a failed step may have left in the shard."""

    batch_id: int
    after_error: bool = False


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until an entry is appended."""


Call = Prefill | Decode | Filter | Clear | Idle


@dataclass(frozen=True, slots=True)
class Deliveries:
    """The output of a reply, by entry.

    `lost` entries left the shard's batch without a last token; `num_dropped` counts cancelled ones.
    """

    generations: Sequence[tuple[Entry, Generation]] = ()
    lost: Sequence[Entry] = ()
    num_dropped: int = 0


NO_DELIVERIES = Deliveries()
