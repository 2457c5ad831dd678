"""The step trace: the content of its rows, and that they reach the file."""

import json
from pathlib import Path
from typing import Any

from reference_server.messages import CachedBatch, DraftCounts, Generation, StepResult, Timings
from reference_server.router.scheduling.calls import NO_DELIVERIES, Call, Decode, Filter, Idle, Prefill
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.scheduling.step_work import StepMeter
from reference_server.router.telemetry.step_trace import StepTrace
from tests.reference_server.router.scheduling.test_virtual_time import ENDED, TOKEN
from tests.support.wire.valid_requests import valid_request


def read_rows(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    return head, [dict(zip(head["columns"], row, strict=True)) for row in rows]


def reply(*ids: int, ended: bool = False, running: tuple[int, ...] = ()) -> StepResult:
    batch = CachedBatch(0, running, 64 * len(running), len(running)) if running else None
    made = tuple(Generation(i, TOKEN, generated_text=ENDED if ended else None) for i in ids)
    return StepResult(made, batch, Timings(10, 20, 30), DraftCounts((2, 1), (1, 0)))


def test_each_step_is_a_row_with_its_work(tmp_path: Path):
    scheduler = Scheduler(SchedulerOptions(1000, 4000, block_size=16, adapters=("poet",)))
    trace = StepTrace(tmp_path / "steps.jsonl", {"model_id": "m"})

    def step(now_ns: int, answer: StepResult | None, answered_ns: int = 0) -> None:
        call = scheduler.next_call(now_ns)
        trace.on_call(call, scheduler, now_ns)
        if answer is not None:
            assert isinstance(call, Prefill | Decode)
            trace.on_reply(call, scheduler.on_reply(call, answer), answer, scheduler, answered_ns)
        else:
            assert isinstance(call, Idle)

    scheduler.append(valid_request(100, 3), 0)
    scheduler.append(valid_request(50, 3, adapter_id="poet"), 0)
    step(1000, reply(0, 1, running=(0, 1)), 1490)
    step(1500, reply(0, 1, running=(0, 1)), 1700)
    step(1710, reply(0, 1, ended=True), 1900)
    step(2000, None)
    trace.close()

    head, rows = read_rows(tmp_path / "steps.jsonl")
    assert head["facts"] == {"model_id": "m"}
    prefill, first, last = rows
    assert (prefill["kind"], prefill["prompts"], prefill["tokens"], prefill["squares"]) == ("prefill", 2, 150, 12_500)
    assert (prefill["rows"], prefill["wall_ns"], prefill["forward_ns"]) == (0, 490, 10)
    assert (first["kind"], first["rows"], first["kv"], first["wall_ns"]) == ("decode", 2, 152, 210)
    assert (last["rows"], last["kv"], last["wall_ns"]) == (2, 154, 200)
    assert [each["at_ns"] for each in rows] == [1000, 1490, 1700]
    assert [(each["adapters"], each["adapted_tokens"]) for each in rows] == [(1, 50), (1, 1), (1, 1)]
    assert (last["drafts_proposed"], last["drafts_accepted"]) == ([2, 1], [1, 0])


def test_the_calls_after_an_ended_request_count_to_the_next_step(tmp_path: Path):
    scheduler = Scheduler(SchedulerOptions(1000, 4000, block_size=16))
    trace = StepTrace(tmp_path / "steps.jsonl", {})

    def call(now_ns: int, answer: StepResult | CachedBatch | None, answered_ns: int) -> Call:
        call = scheduler.next_call(now_ns)
        trace.on_call(call, scheduler, now_ns)
        deliveries = NO_DELIVERIES if answer is None else scheduler.on_reply(call, answer)
        if isinstance(answer, StepResult):
            trace.on_reply(call, deliveries, answer, scheduler, answered_ns)
        return call

    for _ in range(2):
        scheduler.append(valid_request(100, 3), 0)
    call(1000, reply(0, 1, running=(0, 1)), 1400)
    half = reply(0, ended=True, running=(0, 1))
    call(1410, StepResult((*half.generations, *reply(1).generations), half.batch), 1500)
    assert isinstance(call(1510, CachedBatch(0, (1,), 64, 1), 1800), Filter)
    call(1810, reply(1, ended=True), 1900)
    assert isinstance(call(1910, None, 0), Idle)
    scheduler.append(valid_request(100, 3), 5000)
    call(5000, reply(2, running=(2,)), 5400)
    trace.close()

    _, rows = read_rows(tmp_path / "steps.jsonl")
    assert [(row["wall_ns"], row["rows"], row["ended"]) for row in rows] == [
        (400, 0, 0),
        (100, 2, 0),
        (400, 1, 1),
        (400, 0, 0),
    ]


def test_a_chunked_step_is_prefill_and_decode_together():
    scheduler = Scheduler(SchedulerOptions(32, 4000, block_size=16, supports_chunking=True))
    meter = StepMeter()
    scheduler.append(valid_request(20, 5), 0)
    call = scheduler.next_call(0)
    assert isinstance(call, Prefill)
    meter.on_reply(scheduler.on_reply(call, reply(0, running=(0,))))
    scheduler.append(valid_request(100, 5), 0)

    call = scheduler.next_call(0)

    assert isinstance(call, Prefill)
    assert call.cached is not None
    work = meter.work(call, scheduler)
    assert (work.prompts, work.tokens, work.squares, work.cached) == (1, 32, 1024, 0)
    assert (work.rows, work.kv) == (1, 21)


def test_entries_that_end_without_a_last_token_are_forgotten():
    scheduler = Scheduler(SchedulerOptions(1000, 4000, block_size=16))
    meter = StepMeter()
    entry = scheduler.append(valid_request(100, 5), 0)
    scheduler.append(valid_request(50, 5), 0)
    call = scheduler.next_call(0)
    meter.on_reply(scheduler.on_reply(call, reply(0, 1, running=(0, 1))))
    scheduler.cancel(entry)
    call = scheduler.next_call(0)
    meter.on_reply(scheduler.on_reply(call, reply(0, 1, running=(0, 1))))

    meter.forget_others(scheduler)

    scheduler.on_reply(scheduler.next_call(0), CachedBatch(0, (1,), 64, 1))
    call = scheduler.next_call(0)
    assert isinstance(call, Decode)
    assert (meter.work(call, scheduler).rows, meter.work(call, scheduler).kv) == (1, 52)
