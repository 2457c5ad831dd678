"""The settled requests of a run that is not over: those that were sent before every request in flight.

The requests that have ended by some moment are not a sample of all requests: of 512 that start together, the first 50
to end are the shortest. Among settled requests, a long one is as frequent as in the whole run, and every token up to
the start of the last of them was received.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reports.run_schema import RequestRecord


@dataclass(frozen=True, slots=True)
class SettledRequests:
    """`records`: the settled requests. `end_ns`: the start of the last one, since the run's start."""

    records: list[RequestRecord]
    end_ns: int


def settled_requests(
    records: Sequence[RequestRecord], workers: Iterable[int] = (), *, is_open_loop: bool = False
) -> SettledRequests:
    """The settled requests of all workers.

    A worker numbers its requests from 1 in the order of their sends, so the first number without a record is in flight.
    workers: those of the run; one without a record may have sent its first request at any time.
    """
    starts: dict[int, dict[int, int]] = defaultdict(dict, {worker: {} for worker in workers})
    for record in records:
        number = sent_number(record)
        if number is not None:
            starts[record.worker][number] = start_ns_of(record, is_open_loop)
    end_ns = min(map(_last_settled_ns, starts.values()), default=-1)
    return SettledRequests([each for each in records if start_ns_of(each, is_open_loop) <= end_ns], end_ns)


def sent_number(record: RequestRecord) -> int | None:
    """The place of a request among those that its worker sent, from 1; None if it waited and was never sent.

    >>> [sent_number(RequestRecord("a-1", name)) for name in ("a-1-7", "a-1-w7-p2")]
    [7, None]
    """
    name = record.request_id.removeprefix(f"{record.run_id}-").removeprefix(f"{record.worker}-")
    return int(name) if name.isdigit() else None


def start_ns_of(record: RequestRecord, is_open_loop: bool) -> int:
    """The intended start in an open loop, the send in a closed loop."""
    first, second = (
        (record.t_intended_ns, record.t_sent_ns) if is_open_loop else (record.t_sent_ns, record.t_intended_ns)
    )
    return first if first is not None else second if second is not None else record.t_dispatch_ns or 0


def _last_settled_ns(starts: dict[int, int]) -> int:
    """The start of the last request before the first in flight; -1 without one. starts: by number, of one worker."""
    number = 0
    while number + 1 in starts:
        number += 1
    return starts.get(number, -1)
