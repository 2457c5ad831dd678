"""One seeded load through the asyncio router on a scripted shard, and through the simulator: the same calls."""

import asyncio
import contextlib
import random
from typing import Any

import pytest

from reference_server.messages import ChooserParameters, ModelInfo, Request, StepResult, StoppingParameters
from reference_server.router.batching import Batcher
from reference_server.router.scheduling.blocks import round_up
from reference_server.router.scheduling.calls import Call, Decode, Deliveries, Idle, Prefill
from reference_server.router.scheduling.request import ValidGenerateRequest
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.scheduling.step_work import StepMeter, StepWork
from tests.support.wire.scripted_shard import Reply, ScriptedShard
from tests.support.wire.virtual_time import VirtualTimeLoop, run_in_virtual_time
from tuner.simulator.simulation import PlannedRequest, SimulatedLoad, Simulation

Call_ = tuple[str, tuple[int, ...], int, tuple[tuple[int, ...], ...], int]


class Law:
    """Step times that differ for each shape."""

    kv_ns = 31.0

    def step_ns(self, work: StepWork) -> float:
        prefill = 10_000_019 + 100_003 * work.tokens + 7 * work.squares + 11 * work.cached if work.prompts else 0
        return prefill + 5_000_011 + 1_000_003 * work.rows + 31 * work.kv + 700_001 * work.ended


def described(call: Prefill | Decode, now_ns: int) -> Call_:
    if isinstance(call, Prefill):
        ids = tuple(entry.id for entry in call.entries)
        return "prefill", ids, call.batch.id, tuple(request.blocks for request in call.batch.requests), now_ns
    ids = tuple(request_id for batch in call.batches for request_id in batch.request_ids)
    return "decode", ids, call.batches[0].id, (), now_ns


class TimedShard(ScriptedShard):
    """Sleeps for the step time of the law; the router's meter counts the work of the call."""

    step_ns = 0

    async def _enter(self, method: str, *args: object) -> None:
        await asyncio.sleep(self.step_ns if method in ("prefill", "decode") else 0)

    def _reserved(self, sequence: Any) -> int:
        blocks = sequence.request.blocks
        slots = sequence.prompt_len + sequence.request.stopping.max_new_tokens - 1
        return len(blocks) * self._info.block_size if blocks else round_up(slots, self._info.block_size)


class Listener:
    """The loop's trace: records each call and sets its duration in the shard."""

    def __init__(self, shard: TimedShard) -> None:
        self.calls: list[Call_] = []
        self._shard = shard
        self._meter = StepMeter()

    def on_call(self, call: Call, scheduler: Scheduler, now_ns: int) -> None:
        if isinstance(call, Idle):
            self._meter.on_idle()
        if isinstance(call, Prefill | Decode):
            self.calls.append(described(call, now_ns))
            self._shard.step_ns = round(Law().step_ns(self._meter.work(call, scheduler)))

    def on_reply(
        self, call: Call, deliveries: Deliveries, reply: StepResult, scheduler: Scheduler, now_ns: int
    ) -> None:
        self._meter.on_reply(deliveries)

    def on_error(self, scheduler: Scheduler) -> None:
        raise AssertionError("no step fails")


async def routed(options: SchedulerOptions, load: SimulatedLoad) -> list[Call_]:
    info = ModelInfo(
        options.requires_padding,
        "torch.float32",
        "cpu",
        support_chunking=options.supports_chunking,
        use_prefix_caching=options.use_prefix_caching,
        block_size=options.block_size,
    )
    shard = TimedShard(lambda request: Reply(("a",)), info=info, max_prefill_tokens=options.max_batch_prefill_tokens)
    listener = Listener(shard)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    batcher = Batcher(shard, Scheduler(options), trace=listener, now_ns=lambda: loop.now_ns)
    running = asyncio.create_task(batcher.run())

    async def one(at_ns: int, ask: PlannedRequest) -> None:
        await asyncio.sleep(at_ns)
        stopping = StoppingParameters(ask.output_tokens, ignore_eos_token=True)
        ids = ask.ids or (0,) * ask.input_tokens
        wire = Request(0, ("w " * len(ids),), len(ids), ChooserParameters(), stopping)
        request = ValidGenerateRequest(wire, ids, ask.output_tokens)
        async for _ in batcher.submit(request):
            pass

    async with asyncio.TaskGroup() as group:
        for at_ns, ask in zip(load.times_ns or (), load.planned, strict=True):
            group.create_task(one(at_ns, ask))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return listener.calls


ADMISSIONS = {
    "padded": SchedulerOptions(600, 2400, 0.8, 7, requires_padding=True, block_size=16),
    "paged": SchedulerOptions(600, 2400, 1.2, 5, block_size=16),
    "paged_radix": SchedulerOptions(600, 2400, 0.3, 20, block_size=16, use_prefix_caching=True),
    "chunked": SchedulerOptions(100, 2400, block_size=16, supports_chunking=True, use_prefix_caching=True),
}


# The short suite has each admission once.
SHORT = (("padded", True), ("paged", False), ("paged_radix", False), ("chunked", True))


@pytest.mark.parametrize(
    ("options", "strides"),
    [
        pytest.param(
            options,
            strides,
            id=f"{name}-{'strides' if strides else 'single_steps'}",
            marks=() if (name, strides) in SHORT else pytest.mark.slow,
        )
        for name, options in ADMISSIONS.items()
        for strides in (True, False)
    ],
)
def test_simulation_V8_the_router_makes_the_same_calls(options: SchedulerOptions, strides: bool):
    rng = random.Random(8)
    planned, times, at_ns = [], [], 0
    for _ in range(150):
        shared, length = rng.choice([0, 40, 90]), rng.randint(1, 200)
        own = tuple(rng.randrange(1000, 2000) for _ in range(length))
        ids = (*range(shared), *own)
        planned.append(PlannedRequest(len(ids), rng.randint(1, 40), None, ids))
        at_ns += round(rng.expovariate(1 / 30e6))
        times.append(at_ns)
    load = SimulatedLoad(planned, times_ns=times)

    in_router = run_in_virtual_time(routed(options, load))

    simulated: list[Call_] = []
    Simulation(
        load,
        [(options, Law())],
        with_strides=strides,
        on_call=lambda call, now_ns: simulated.append(described(call, now_ns)),
    ).run()
    if strides:
        distinct = set(simulated)
        assert len(simulated) < len(in_router)
        assert [call for call in in_router if call in distinct] == simulated
    else:
        assert simulated == in_router
    assert {"prefill", "decode"} == {call[0] for call in simulated}
    assert len(in_router) > 200
