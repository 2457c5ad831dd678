"""The Scheduler driven in virtual time.

Prefill takes 10 ms + 0.1 ms per token, decode 5 ms + 1 ms per row. Whole prompts, prefill budget 1000. Times are in µs.
"""

from dataclasses import dataclass, field

from reference_server.messages import CachedBatch, FinishReason, GeneratedText, Generation, StepResult, Tokens
from reference_server.router.scheduling.calls import Clear, Decode, Filter, Idle, Prefill
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from tests.support.wire.valid_requests import valid_request

TOKEN = Tokens((1,), (0.0,), ("a",), (False,))
ENDED = GeneratedText("", 1, FinishReason.LENGTH)


@dataclass
class Replay:
    """First token and end of each request, in ms, for a load of (arrival ms, input, output)."""

    ratio: float = 1.2
    max_waiting_tokens: int = 20
    pool: int = 1000
    first: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)
    num_decodes: int = 0

    def run(self, *load: tuple[int, int, int]) -> "Replay":
        # One block more than the pool: block 0 is never allocated.
        options = SchedulerOptions(1000, self.pool + 1, self.ratio, self.max_waiting_tokens, block_size=1)
        scheduler, now_us, arrivals, rows = Scheduler(options), 0, list(load), {}
        left: dict[int, int] = {}
        while True:
            while arrivals and arrivals[0][0] * 1000 <= now_us:
                _, input_len, output_len = arrivals.pop(0)
                left[scheduler.append(valid_request(input_len, output_len), now_us * 1000).id] = output_len
            call = scheduler.next_call(now_us * 1000)
            match call:
                case Idle():
                    if not arrivals:
                        return self
                    now_us = arrivals[0][0] * 1000
                    continue
                case Clear():
                    scheduler.on_reply(call, None)
                    continue
                case Filter():
                    rows[call.batch_id] = call.request_ids
                    scheduler.on_reply(call, CachedBatch(call.batch_id, call.request_ids, 0, len(call.request_ids)))
                    continue
                case Prefill():
                    batch_id, ids = call.batch.id, [entry.id for entry in call.entries]
                    now_us += 10_000 + 100 * sum(entry.request.input_len for entry in call.entries)
                case Decode():
                    batch_id, ids = call.batches[0].id, [i for part in call.batches for i in rows.pop(part.id)]
                    now_us += 5_000 + 1_000 * len(ids)
                    self.num_decodes += 1
            for i in ids:
                left[i] -= 1
                self.first.setdefault(i, now_us / 1000)
                if left[i] == 0:
                    self.end[i] = now_us / 1000
            generations = tuple(Generation(i, TOKEN, generated_text=None if left[i] else ENDED) for i in ids)
            batch = None
            if any(left[i] for i in ids):
                rows[batch_id] = tuple(ids)
                batch = CachedBatch(batch_id, tuple(ids), 0, len(ids))
            scheduler.on_reply(call, StepResult(generations, batch))


def test_simulation_V1_two_that_arrive_together_run_together():
    replay = Replay().run((0, 100, 3), (0, 100, 3))

    assert replay.first == {0: 30, 1: 30}
    assert replay.end == {0: 44, 1: 44}
    assert replay.num_decodes == 2


def test_simulation_V2_a_second_one_joins_at_the_next_turn():
    replay = Replay().run((0, 100, 10), (21, 100, 10))

    assert replay.first == {0: 20, 1: 46}
    assert replay.end == {0: 102, 1: 108}
    assert replay.num_decodes == 10


def test_simulation_V3_a_ratio_holds_it_back_until_it_has_waited():
    replay = Replay(ratio=3.0, max_waiting_tokens=4).run((0, 100, 10), (21, 100, 10))

    assert replay.first == {0: 20, 1: 58}
    assert replay.end == {0: 100, 1: 118}
    assert replay.num_decodes == 12


def test_simulation_V4_nothing_passes_the_head_of_the_line():
    replay = Replay(pool=150).run((0, 100, 5), (0, 100, 5), (0, 10, 5))

    assert replay.first == {0: 20, 1: 65, 2: 65}
    assert replay.end == {0: 44, 1: 93, 2: 93}
