"""Step trace: one row per model step, for the tuner's cost model.

The event loop only appends a tuple per step to a ring; a thread writes the rows.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from reference_server.messages import StepResult
from reference_server.router.scheduling.calls import Call, Decode, Deliveries, Idle, Prefill
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.step_work import StepMeter, StepWork

logger = logging.getLogger(__name__)

RING_ROWS = 65_536
FLUSH_S = 0.5
FORMAT = 2


class StepListener(Protocol):
    """Receives the batching loop's calls and replies."""

    def on_call(self, call: Call, scheduler: Scheduler, now_ns: int) -> None: ...

    def on_reply(
        self, call: Call, deliveries: Deliveries, reply: StepResult, scheduler: Scheduler, now_ns: int
    ) -> None:
        """A step was answered at `now_ns`."""
        ...

    def on_error(self, scheduler: Scheduler) -> None: ...


COLUMNS = (
    *("at_ns", "kind", *StepWork._fields, "generations", "accepted", "drafts_proposed", "drafts_accepted"),
    *("adapters", "adapted_tokens", "forward_ns", "decode_ns", "concat_ns", "total_ns", "wall_ns"),
)


class StepTrace:
    """Writes JSON lines: a header with columns and facts, then one list per step; at most `RING_ROWS` wait unwritten.

    `accepted`: tokens beyond one for each generation, of any shard. `drafts_proposed`, `drafts_accepted`: lists by the
    place in a draft, of our own shards. `adapters`: different ones in the step; `adapted_tokens`: computed with one.
    A step lasts from the answer to the step before it to its own answer (`wall_ns`, from `at_ns`), and the first step
    after an idle time from its call. So the calls between two steps (Filter, Clear) count to the later one: they wait
    for its forward if it runs ahead.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._write({"format": FORMAT, "columns": COLUMNS, "facts": facts})
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=RING_ROWS)
        self._meter = StepMeter()
        self._sent: tuple[str, StepWork, tuple[int, int]] | None = None
        self._begun_ns: int | None = None  # of the step in progress, or of the next one
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._flush_until_stopped, name="step-trace", daemon=True)
        self._thread.start()

    def on_call(self, call: Call, scheduler: Scheduler, now_ns: int) -> None:
        if isinstance(call, Idle):
            self._begun_ns = None
            self._meter.on_idle()
        elif isinstance(call, Prefill | Decode):
            if self._begun_ns is None:
                self._begun_ns = now_ns
            kind = "prefill" if isinstance(call, Prefill) else "decode"
            self._sent = (kind, self._meter.work(call, scheduler), self._meter.adapted(call, scheduler))

    def on_reply(
        self, call: Call, deliveries: Deliveries, reply: StepResult, scheduler: Scheduler, now_ns: int
    ) -> None:
        if not isinstance(call, Prefill | Decode):
            return
        counted = self._meter.on_reply(deliveries)
        if deliveries.lost or deliveries.num_dropped:
            self._meter.forget_others(scheduler)
        if self._sent is not None and self._begun_ns is not None:
            (kind, work, adapted), begun_ns = self._sent, self._begun_ns
            timings, drafts = reply.timings, reply.drafts
            times = (timings.forward_ns, timings.decode_ns, timings.concat_ns or 0, timings.total_ns)
            drafted = (drafts.proposed, drafts.accepted)
            self._rows.append((begun_ns, kind, *work, *counted, *drafted, *adapted, *times, now_ns - begun_ns))
        self._sent, self._begun_ns = None, now_ns

    def on_error(self, scheduler: Scheduler) -> None:
        self._sent = self._begun_ns = None
        self._meter.forget_others(scheduler)

    def close(self) -> None:
        """Write the remaining rows. An unfinished step has none."""
        self._stop.set()
        self._thread.join()
        self._flush()
        self._file.close()

    def _flush_until_stopped(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self._flush()

    def _flush(self) -> None:
        rows = []
        while self._rows:
            rows.append(self._rows.popleft())
        try:
            for row in rows:
                self._write(row)
            self._file.flush()
        except OSError as error:
            logger.warning("could not write the step trace: %s", error)

    def _write(self, value: object) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
