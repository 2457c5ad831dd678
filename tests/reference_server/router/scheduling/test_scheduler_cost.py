"""Cost of a turn of the Scheduler in Python calls: exact, without a clock."""

import gc
import sys
from types import FrameType

import pytest

from reference_server.messages import CachedBatch, Generation, StepResult, Timings, Tokens
from reference_server.router.scheduling.calls import Decode, Prefill
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions, WireVersion
from tests.support.wire.valid_requests import valid_request

POLICIES = {
    "chunked": {"supports_chunking": True, "use_prefix_caching": True},
    "whole": {"waiting_served_ratio": 0.0},
    "put back": {"waiting_served_ratio": 2.5, "max_waiting_tokens": 10**6},
    "padded": {"requires_padding": True, "waiting_served_ratio": 0.0},
    "v2": {"schema": WireVersion.V2, "waiting_served_ratio": 0.0},
}
ROWS = 4


def calls_of_a_turn(policy: str, waiting: int) -> int:
    """Python calls of one `next_call` and `on_reply` while no waiting entry can join."""
    room = ROWS + (3 if policy == "put back" else 0)
    scheduler = Scheduler(SchedulerOptions(64 * ROWS, 16 * (9 * room + 1), block_size=16, **POLICIES[policy]))
    for _ in range(ROWS):
        scheduler.append(valid_request(64, 65), now_ns=0)
    step(scheduler)
    for _ in range(waiting):
        scheduler.append(valid_request(64, 65), now_ns=0)
    step(scheduler)
    count = 0

    def counts(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # callbacks of a collection would be counted
    sys.setprofile(counts)
    try:
        step(scheduler)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert scheduler.queue_size == waiting
    return count


def step(scheduler: Scheduler) -> None:
    call = scheduler.next_call(0)
    assert isinstance(call, Prefill | Decode)
    ids = range(ROWS)
    token = Tokens((5,), (-1.0,), ("a",), (False,))
    batch = CachedBatch(0, tuple(ids), max_tokens=16 * 8 * ROWS, current_tokens=ROWS)
    scheduler.on_reply(call, StepResult(tuple(Generation(id_, token) for id_ in ids), batch, Timings()))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_turn_costs_the_same_however_many_wait(policy):
    few = calls_of_a_turn(policy, 10)

    assert calls_of_a_turn(policy, 5000) == few
