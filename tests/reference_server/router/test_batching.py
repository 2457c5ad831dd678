import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import replace

import pytest

from reference_server.errors import (
    GenerationError,
    IncompleteGenerationError,
    ShardConnectionError,
    ShardError,
    StepTimeoutError,
    ValidationError,
)
from reference_server.messages import DraftCounts, FinishReason, GeneratedText, ModelInfo, Tokens
from reference_server.router import batching
from reference_server.router.batching import Batcher, generation_error
from reference_server.router.generation_stream import Finished, GeneratedToken, PrefillDone, TokenArrived
from reference_server.router.liveness import LIVENESS_ID
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.telemetry.observer import NullObserver
from reference_server.transport.shard import ShardGroup
from tests.support.wire.scripted_shard import EOS_ID, Reply, ScriptedShard, say
from tests.support.wire.valid_requests import valid_request
from tests.support.wire.wire_shard import served, socket_urls

PLAIN = ModelInfo(requires_padding=False, dtype="torch.float32", device_type="cpu", block_size=16)


class Recorder(NullObserver):
    """Records the events."""

    def __init__(self):
        self.counts = Counter()
        self.queue, self.running, self.methods, self.batches, self.free_blocks = [], [], [], [], []

    def on_queue(self, size):
        self.queue.append(size)

    def on_batch(self, size, reason, prompt_tokens, prefix_hit_tokens):
        self.batches.append((size, reason, prompt_tokens, prefix_hit_tokens))

    def on_call(self, method):
        self.counts[f"call {method}"] += 1

    def on_call_done(self, method, timings, total_ns, filter_ns, tokens):
        assert 0 <= filter_ns <= total_ns
        assert timings.forward_ns == 1000
        self.counts[f"done {method}"] += 1
        self.counts[f"tokens of {method}"] += tokens

    def on_call_failed(self, method):
        self.counts[f"failed {method}"] += 1

    def on_running(self, size, max_tokens):
        self.running.append((size, max_tokens))

    def on_blocks(self, free, total):
        self.free_blocks.append(free)

    def on_tokens(self, skipped, times):
        self.counts[f"skipped {skipped}"] += times

    def on_failures(self, err, count):
        self.counts[err] += count


class Gate:
    """Holds every call of one method until it is opened."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self, method: str) -> None:
        if method == self.method:
            self.reached.set()
            await self.opened.wait()


class Clock:
    """A time that a test sets."""

    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns


def options(**changes) -> SchedulerOptions:
    return SchedulerOptions(**{"max_batch_prefill_tokens": 256, "max_batch_total_tokens": 16 * 64} | changes)


@contextlib.asynccontextmanager
async def running(shard, *, reached=None, observer=None, now_ns=time.perf_counter_ns, warm_up=None, **changes):
    """A Batcher whose loop runs; afterwards every block is free again. reached: the transport, and its directory."""
    async with contextlib.AsyncExitStack() as stack:
        if reached is not None:
            transport, directory = reached
            shard = await stack.enter_async_context(served([shard], socket_urls(directory), transport=transport))
        started = _started(shard, observer, now_ns, warm_up, changes)
        yield await stack.enter_async_context(started)


@contextlib.asynccontextmanager
async def _started(shard, observer, now_ns, warm_up, changes):
    scheduler = Scheduler(options(**changes))
    batcher = Batcher(shard, scheduler, observer=observer, warm_up=warm_up, now_ns=now_ns)
    loop = asyncio.create_task(batcher.run())
    try:
        yield batcher, scheduler, loop
    finally:
        loop.cancel()
        await asyncio.wait([loop])
    assert scheduler.entries == ()
    assert scheduler.queue_size == 0
    allocator = scheduler.queue.admission.allocator
    allocator.forget_prefixes()
    assert len(allocator.free_blocks) == allocator.capacity


@pytest.fixture(params=[None, "grpc", "link"], ids=["in process", "grpc", "link"])
def reached(request, tmp_path):
    """How the shard is reached, for `running`."""
    return request.param and (request.param, tmp_path)


async def read(stream):
    return [event async for event in stream]


async def quiet():
    """Let everything that is ready run."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_free_blocks_are_those_that_no_running_request_holds():
    recorder = Recorder()
    async with running(ScriptedShard(say("a", "b", "c")), observer=recorder) as (batcher, _, _):
        await quiet()
        await read(batcher.submit(valid_request(17, 9)))
        await quiet()

    # 17 prompt tokens and 8 of the 9 new ones need two blocks of 16.
    assert (recorder.free_blocks[0], min(recorder.free_blocks), recorder.free_blocks[-1]) == (63, 61, 63)


async def test_a_stream_yields_its_tokens_and_its_end(reached):
    async with running(ScriptedShard(say("Hi", " you")), reached=reached) as (batcher, _, _):
        stream = batcher.submit(valid_request(3, 9))
        events = await read(stream)

    hi, you, end = events
    assert hi == TokenArrived(GeneratedToken(10, "Hi", -0.5, False), ())
    assert you == TokenArrived(GeneratedToken(11, " you", -0.5, False), ())
    assert isinstance(end, Finished)
    assert end.token == GeneratedToken(EOS_ID, "</s>", -0.5, True)
    assert end.generated_text.text == "Hi you"
    assert end.queued_ns <= end.started_ns


async def test_a_stream_yields_prompt_details_and_top_tokens(reached):
    async with running(ScriptedShard(say("Hi")), reached=reached) as (batcher, _, _):
        details, token, end = await read(batcher.submit(valid_request(3, 2, prefill_logprobs=True, top_n_tokens=2)))

    assert isinstance(details, PrefillDone)
    assert len(details.tokens) == 3
    assert [each.text for each in token.top_tokens] == ["Hi", "Hi1"]
    assert len(end.top_tokens) == 2


async def test_several_tokens_of_one_step_arrive_as_several_events(reached):
    observer = Recorder()
    shard = ScriptedShard(lambda _: Reply(("a", "b", "c", "d"), tokens_per_step=3))
    async with running(shard, reached=reached, observer=observer) as (batcher, _, _):
        events = await read(batcher.submit(valid_request(3, 4)))

    assert [type(event) for event in events] == [TokenArrived, TokenArrived, TokenArrived, Finished]
    assert (observer.counts["skipped 2"], observer.counts["skipped 0"]) == (1, 1)


async def test_requests_that_wait_together_share_a_forward(reached):
    shard = ScriptedShard()
    async with running(shard, reached=reached) as (batcher, _, _):
        await asyncio.gather(*(read(batcher.submit(valid_request(4, 5))) for _ in range(8)))

    assert [batch.size for batch, _ in shard.called("prefill")] == [8]
    assert shard.cached_ids == {}


async def test_a_request_that_could_never_run_is_refused_at_once():
    async with running(ScriptedShard()) as (batcher, scheduler, _):
        with pytest.raises(ValidationError, match="blocks of the key-value cache"):
            batcher.submit(valid_request(1000, 1000))
        assert scheduler.queue_size == 0


@pytest.mark.parametrize("supports_chunking", [True, False])
async def test_closing_a_running_stream_frees_its_blocks_and_leaves_the_others_alone(reached, supports_chunking):
    observer = Recorder()
    shard = ScriptedShard(say(*"abcdefgh"))
    async with running(shard, reached=reached, observer=observer, supports_chunking=supports_chunking) as (
        batcher,
        scheduler,
        _,
    ):
        leaving, staying = batcher.submit(valid_request(4, 8)), batcher.submit(valid_request(4, 8))
        await anext(leaving)
        leaving.close()
        leaving.close()
        events = await read(staying)

        assert len(events) == 8
        assert scheduler.entries == ()
        assert [args[1] for args in shard.called("filter_batch")] == [(1,)]
    assert observer.counts["dropped"] == 1


async def test_closing_a_waiting_stream_removes_it_from_the_queue():
    observer, gate = Recorder(), Gate("prefill")
    shard = ScriptedShard(gate=gate)
    async with running(shard, observer=observer) as (batcher, _, _):
        first = asyncio.create_task(read(batcher.submit(valid_request(4, 4))))
        await gate.reached.wait()
        batcher.submit(valid_request(4, 4)).close()
        gate.opened.set()
        await first
        await quiet()

        assert [[request.id for request in batch.requests] for batch, _ in shard.called("prefill")] == [[0]]
        assert observer.counts["dropped"] == 1


async def test_a_reader_of_a_closed_stream_gets_no_more_events(reached):
    gate = Gate("prefill")
    async with running(ScriptedShard(gate=gate), reached=reached) as (batcher, _, _):
        stream = batcher.submit(valid_request(4, 4))
        reader = asyncio.create_task(read(stream))
        await gate.reached.wait()
        stream.close()
        assert await reader == []
        gate.opened.set()


async def test_a_failed_step_ends_its_requests_and_clears_the_batch(reached):
    observer = Recorder()
    shard = ScriptedShard(say("a", "b", "c"))
    shard.failures["decode"] = ShardError("out of memory")
    async with running(shard, reached=reached, observer=observer) as (batcher, _, _):
        streams = [batcher.submit(valid_request(4, 4)) for _ in range(2)]
        outcomes = await asyncio.gather(*map(read, streams), return_exceptions=True)
        again = await read(batcher.submit(valid_request(4, 4)))

    assert {str(outcome) for outcome in outcomes} == {"Request failed during generation: Server error: out of memory"}
    assert all(isinstance(outcome, GenerationError) for outcome in outcomes)
    assert shard.called("clear_cache") == [(0,)]
    assert len(again) == 4
    assert (observer.counts["generation"], observer.counts["failed decode"]) == (2, 1)


async def test_a_failed_join_leaves_the_running_batch_alone(reached):
    shard = ScriptedShard(say(*"abcdefgh"), info=PLAIN)
    async with running(shard, reached=reached, waiting_served_ratio=0.0) as (batcher, _, _):
        old = batcher.submit(valid_request(4, 8))
        await anext(old)
        shard.failures["prefill"] = ShardError("bad prompt")
        new = batcher.submit(valid_request(4, 8))

        with pytest.raises(GenerationError, match="bad prompt"):
            await read(new)
        assert len(await read(old)) == 7


async def test_reliability_F1_a_lost_connection_ends_running_and_waiting_requests():
    observer, gate = Recorder(), Gate("decode")
    shard = ScriptedShard(say("a", "b", "c"), gate=gate)
    async with running(shard, observer=observer, max_batch_size=1, supports_chunking=False) as (batcher, _, _):
        streams = [batcher.submit(valid_request(4, 4)) for _ in range(3)]
        reading = asyncio.gather(*map(read, streams), return_exceptions=True)
        await gate.reached.wait()
        gate.opened.set()

        async def gone(method):
            raise ShardConnectionError("socket closed")

        shard.gate = gone
        shard.failures["decode"] = ShardConnectionError("socket closed")
        outcomes = await reading
        healthy = await batcher.health()

    text = "Request failed during generation: Could not connect to Text Generation server: socket closed"
    assert [str(outcome) for outcome in outcomes] == [text] * 3
    assert observer.counts["generation"] == 3
    assert not healthy


async def test_reliability_F6_a_request_missing_from_the_shards_batch_fails_alone(reached):
    shard = ScriptedShard(lambda request: Reply(("a", "b", "c"), drop_after=1 if request.id == 0 else None))
    async with running(shard, reached=reached) as (batcher, _, _):
        streams = [batcher.submit(valid_request(4, 4)) for _ in range(2)]
        dropped, other = await asyncio.gather(*map(read, streams), return_exceptions=True)

        assert str(dropped) == "Request failed during generation: dropped by the model server"
        assert len(other) == 4
        assert batcher.is_healthy


async def test_reliability_F9_a_failed_filter_ends_everything(reached):
    shard = ScriptedShard(lambda request: Reply(("a",) * (1 if request.id == 0 else 9)))
    shard.failures["filter_batch"] = ShardError("unknown batch")
    async with running(shard, reached=reached, max_batch_size=2) as (batcher, _, loop):
        streams = [batcher.submit(valid_request(4, 9)) for _ in range(3)]
        ended, kept, waiting = await asyncio.gather(*map(read, streams), return_exceptions=True)
        with pytest.raises(ShardError, match="unknown batch"):
            await loop

        assert isinstance(ended[-1], Finished)
        assert str(kept) == "Request failed during generation: Server error: unknown batch"
        assert isinstance(waiting, IncompleteGenerationError)
        assert shard.called("clear_cache") == [(None,)]
        assert not await batcher.health()
        with pytest.raises(IncompleteGenerationError):
            batcher.submit(valid_request(1, 1))


async def test_reliability_F9_a_failed_clear_ends_the_loop(reached):
    gate = Gate("decode")
    shard = ScriptedShard(say(*"abcdefgh"), gate=gate)
    shard.failures["clear_cache"] = ShardError("unknown batch")
    async with running(shard, reached=reached) as (batcher, _, loop):
        stream = batcher.submit(valid_request(4, 8))
        await gate.reached.wait()
        stream.close()
        gate.opened.set()
        with pytest.raises(ShardError, match="unknown batch"):
            await loop

        assert not batcher.is_healthy


async def test_reliability_F3_a_shard_that_hangs_ends_everything():
    shard = ScriptedShard()
    shard.failures["decode"] = StepTimeoutError(120)
    async with running(shard, max_batch_size=1) as (batcher, _, loop):
        streams = [batcher.submit(valid_request(4, 4)) for _ in range(2)]
        outcomes = await asyncio.gather(*map(read, streams), return_exceptions=True)
        with pytest.raises(StepTimeoutError):
            await loop

        assert not batcher.is_healthy
    text = "Request failed during generation: Server error: step timed out after 120 s"
    assert [str(outcome) for outcome in outcomes] == [text] * 2
    assert not shard.called("clear_cache")


def altered(shard: ScriptedShard, alter) -> ScriptedShard:
    """`shard`, whose first decode reply is passed through `alter`."""
    decode = shard.decode

    async def altered_decode(batches):
        shard.decode = decode
        return alter(await decode(batches))

    shard.decode = altered_decode
    return shard


def _without_tokens(result):
    empty = Tokens((), (), (), ())
    ended = GeneratedText("a", 1, FinishReason.LENGTH)
    return replace(
        result, generations=(replace(result.generations[0], tokens=empty, generated_text=ended),), batch=None
    )


def _unequal_fields(result):
    tokens = replace(result.generations[0].tokens, logprobs=())
    return replace(result, generations=(replace(result.generations[0], tokens=tokens),))


MALFORMED_REPLIES = {
    "draft counts of unequal lengths": lambda r: replace(r, drafts=DraftCounts((1, 1), (1,))),
    "an end without a token": _without_tokens,
    "fields of unequal lengths": _unequal_fields,
    "an unknown request": lambda r: replace(r, generations=(replace(r.generations[0], request_id=99),)),
    "a request answered twice": lambda r: replace(r, generations=r.generations * 2),
    "an unknown request in the batch": lambda r: replace(r, batch=replace(r.batch, request_ids=(99,))),
}


@pytest.mark.parametrize("alter", MALFORMED_REPLIES.values(), ids=MALFORMED_REPLIES)
async def test_hardening_R1_a_malformed_reply_is_a_failed_step(reached, alter):
    shard = altered(ScriptedShard(say("a", "b", "c")), alter)
    async with running(shard, reached=reached) as (batcher, _, loop):
        with pytest.raises(GenerationError, match="the model server"):
            await read(batcher.submit(valid_request(4, 3)))
        events = await read(batcher.submit(valid_request(4, 3)))

        assert isinstance(events[-1], Finished)
        assert not loop.done()


async def test_hardening_R1_every_stream_ends_if_delivery_fails():
    class Failing(Recorder):
        def on_tokens(self, skipped, times):
            raise RuntimeError("bug in delivery")

    async with running(ScriptedShard(say("a")), observer=Failing()) as (batcher, _, loop):
        streams = [batcher.submit(valid_request(4, 1)), batcher.submit(valid_request(4, 4))]
        outcomes = await asyncio.gather(*map(read, streams), return_exceptions=True)
        with pytest.raises(RuntimeError, match="bug in delivery"):
            await loop

    assert [type(event) for event in outcomes[0]] == [Finished]
    assert isinstance(outcomes[1], IncompleteGenerationError)


async def test_hardening_R1_a_delivery_that_failed_is_not_repeated(monkeypatch):
    def fail_on_the_end(entry, generation):
        if generation.generated_text is not None:
            raise RuntimeError("bug in delivery")
        return events_of(entry, generation)

    events_of = batching.events_of
    monkeypatch.setattr(batching, "events_of", fail_on_the_end)
    async with running(ScriptedShard(say("a", "b"))) as (batcher, _, loop):
        stream = batcher.submit(valid_request(4, 2))
        first = await anext(stream)
        with pytest.raises(IncompleteGenerationError):
            await anext(stream)
        with pytest.raises(RuntimeError, match="bug in delivery"):
            await loop

    assert isinstance(first, TokenArrived)


async def test_reliability_F8_an_error_in_the_loop_ends_every_request(caplog):
    shard = ScriptedShard()
    shard.failures["prefill"] = RuntimeError("bug")
    observer = Recorder()
    async with running(shard, observer=observer, max_batch_size=1) as (batcher, _, loop):
        streams = [batcher.submit(valid_request(4, 4)) for _ in range(2)]
        outcomes = await asyncio.gather(*map(read, streams), return_exceptions=True)
        with pytest.raises(RuntimeError, match="bug"):
            await loop

    assert [type(outcome) for outcome in outcomes] == [IncompleteGenerationError] * 2
    assert observer.counts["incomplete"] == 2
    assert "Traceback" in caplog.text


async def test_cancelling_the_loop_ends_every_request():
    gate = Gate("decode")
    async with running(ScriptedShard(gate=gate)) as (batcher, _, loop):
        reader = asyncio.create_task(read(batcher.submit(valid_request(4, 4))))
        await gate.reached.wait()
        loop.cancel()
        with pytest.raises(IncompleteGenerationError):
            await reader


async def test_health_probes_the_shard_if_the_last_step_succeeded():
    shard = ScriptedShard()
    async with running(shard) as (batcher, _, _):
        assert await batcher.health()
    assert shard.calls == [("health", ())]


async def test_health_after_a_failure_runs_a_forward_in_block_0():
    shard = ScriptedShard()
    shard.failures["prefill"] = ShardError("broken")
    clock = Clock()
    async with running(shard, now_ns=clock) as (batcher, _, _):
        with pytest.raises(GenerationError):
            await read(batcher.submit(valid_request(4, 4)))
        assert not batcher.is_healthy
        shard.failures["prefill"] = ShardError("still broken")
        assert not await batcher.health()
        clock.now_ns += 2_000_000_000
        assert await batcher.health()
        assert batcher.is_healthy

    assert not shard.called("health")
    (batch, cached) = shard.called("prefill")[-1]
    (probe,) = batch.requests
    assert cached is None
    assert (batch.id, probe.id, batch.max_tokens, batch.max_blocks) == (LIVENESS_ID, LIVENESS_ID, 2, 1)
    assert (probe.text, probe.truncate, probe.blocks, probe.num_slots) == ("liveness", 1, (0,), 1)
    assert (probe.stopping.max_new_tokens, probe.add_special_tokens) == (1, False)


async def test_a_failed_health_check_reports_unhealthy():
    shard = ScriptedShard()
    shard.failures |= {name: ShardConnectionError("gone") for name in ("health", "clear_cache")}
    async with running(shard) as (batcher, _, _):
        assert not await batcher.health()
        assert not batcher.is_healthy


async def test_hardening_R8_clients_that_left_are_not_in_the_queue_behind_a_blocked_head():
    observer = Recorder()
    async with running(ScriptedShard(lambda _: Reply(("x",) * 900)), observer=observer) as (batcher, scheduler, _):
        first = batcher.submit(valid_request(4, 900))
        await anext(first)
        head = batcher.submit(valid_request(100, 800))
        gone = [batcher.submit(valid_request(4, 4)) for _ in range(5000)]
        for stream in gone:
            stream.close()
        waiting = scheduler.queue.waiting
        last_seen = observer.queue[-1]
        head.close()
        first.close()

    assert len(waiting) == 1
    assert last_seen == 1


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (
            "the model server at /tmp/tgi-x1/shard-0 cannot be reached: unix:/tmp/tgi-x1/shard-0: refused",
            "the model server at (path) cannot be reached: (path): refused",
        ),
        ("connect to unix:///run/s-0 failed", "connect to (path) failed"),
        ("File '/usr/lib/a.py', line 3", "File '(path)', line 3"),
        (
            "tcp://10.0.0.1:80/x; 3/4 of 1/2 GiB; see https://a.b/c",
            "tcp://10.0.0.1:80/x; 3/4 of 1/2 GiB; see https://a.b/c",
        ),
    ],
)
def test_hardening_R27_an_error_names_no_path_of_this_machine(error: str, sent: str):
    prefix = "Request failed during generation: "

    assert str(generation_error(ShardError(error))) == f"{prefix}Server error: {sent}"
    assert str(generation_error(ShardConnectionError(error))).endswith(f"server: {sent}")


@pytest.mark.parametrize("first", ["a request", "a health check"])
async def test_hardening_R21_a_shard_that_was_unreachable_is_warmed_up_before_it_serves(first):
    shard = ScriptedShard(say("a", "b", "c"))

    async def warm_up():
        shard.calls.append(("warmup", ()))

    async with running(shard, warm_up=warm_up) as (batcher, _, _):
        stream = batcher.submit(valid_request(4, 3))
        await anext(stream)
        shard.failures["decode"] = ShardConnectionError("gone")
        with pytest.raises(GenerationError):
            await read(stream)
        num_before = len(shard.calls)
        if first == "a health check":
            assert await batcher.health()
        events = await read(batcher.submit(valid_request(4, 3)))

    assert isinstance(events[-1], Finished)
    methods = [name for name, _ in shard.calls[num_before:]]
    assert methods[methods.index("prefill") - 1] == "warmup"
    assert methods.count("warmup") == 1


async def test_hardening_R21_a_shard_that_a_health_check_did_not_reach_is_warmed_up():
    clock, shard = Clock(), ScriptedShard(say("a"))

    async def warm_up():
        shard.calls.append(("warmup", ()))

    async with running(shard, warm_up=warm_up, now_ns=clock) as (batcher, _, _):
        shard.failures |= {name: ShardConnectionError("gone") for name in ("health", "clear_cache")}
        assert not await batcher.health()
        clock.now_ns += 2_000_000_000
        assert await batcher.health()

    assert [name for name, _ in shard.calls] == ["health", "clear_cache", "clear_cache", "warmup", "prefill"]


async def test_hardening_R21_a_shard_whose_probe_fails_is_warmed_up():
    clock, shard = Clock(), ScriptedShard(say("a"))

    async def warm_up():
        shard.calls.append(("warmup", ()))

    async with running(shard, warm_up=warm_up, now_ns=clock) as (batcher, _, _):
        shard.failures["prefill"] = ShardError("Prefill before Warmup")
        with pytest.raises(GenerationError):
            await read(batcher.submit(valid_request(4, 3)))
        shard.failures["prefill"] = ShardError("Prefill before Warmup")
        first = await batcher.health()
        clock.now_ns += 2_000_000_000
        second = await batcher.health()

    assert (first, second) == (False, True)
    assert [name for name, _ in shard.calls][-4:] == ["prefill", "clear_cache", "warmup", "prefill"]


async def test_hardening_R21_a_batch_formed_before_the_warm_up_is_formed_again_without_its_prefix():
    gate, clock, prompt = Gate("health"), Clock(), tuple(range(40))
    shard = ScriptedShard(say("a"), gate=gate)

    async def warm_up():
        shard.calls.append(("warmup", ()))

    async with running(shard, warm_up=warm_up, now_ns=clock, use_prefix_caching=True) as (batcher, _, _):
        await read(batcher.submit(valid_request(40, 2, ids=prompt)))
        clock.now_ns += 2_000_000_000
        shard.failures["health"] = ShardConnectionError("closed the connection")
        probe = asyncio.create_task(batcher.health())
        await gate.reached.wait()
        streams = [batcher.submit(valid_request(40, 2, ids=prompt)) for _ in range(2)]
        await quiet()
        streams[0].close()
        gate.opened.set()
        await read(streams[1])
        healthy = await probe
        batches = [batch for batch, _ in shard.called("prefill")]

    assert healthy
    assert [[request.cache_len for request in batch.requests] for batch in batches] == [[0], [0], [0]]
    assert [batch.id == LIVENESS_ID for batch in batches] == [False, True, False]


async def test_hardening_R21_a_lost_connection_ends_every_stream():
    shard = ScriptedShard(lambda _: Reply(("x",) * 90))
    async with running(shard) as (batcher, _, _):
        first = batcher.submit(valid_request(4, 90))
        await anext(first)
        shard.failures["prefill"] = ShardConnectionError("gone")
        second = batcher.submit(valid_request(4, 90))
        for stream in (second, first):
            with pytest.raises(GenerationError, match="gone"):
                await read(stream)
        num_decodes = len(shard.called("decode"))
        await quiet()

    assert len(shard.called("decode")) == num_decodes


async def test_hardening_R3_many_health_checks_make_one_probe():
    gate, clock = Gate("health"), Clock()
    shard = ScriptedShard(gate=gate)
    async with running(shard, now_ns=clock) as (batcher, _, _):
        checks = [asyncio.create_task(batcher.health()) for _ in range(500)]
        await gate.reached.wait()
        checks[0].cancel()
        gate.opened.set()
        first = await asyncio.gather(*checks[1:])
        clock.now_ns += 999_999_999
        second = await batcher.health()
        num_early = len(shard.called("health"))
        clock.now_ns += 1
        third = await batcher.health()

    assert set(first) == {True}
    assert (second, num_early, third, len(shard.called("health"))) == (True, 1, True, 2)


async def test_hardening_R3_a_recent_step_answers_health_checks():
    clock, shard = Clock(), ScriptedShard(say("a"))
    async with running(shard, now_ns=clock) as (batcher, _, _):
        await read(batcher.submit(valid_request(4, 2)))
        healthy = await batcher.health()

    assert healthy
    assert not shard.called("health")


async def test_hardening_R3_a_failed_step_is_probed_at_once():
    clock, shard = Clock(), ScriptedShard(say("a"))
    async with running(shard, now_ns=clock) as (batcher, _, _):
        await read(batcher.submit(valid_request(4, 2)))
        shard.failures["prefill"] = ShardError("broken")
        with pytest.raises(GenerationError):
            await read(batcher.submit(valid_request(4, 2)))
        num_prefills = len(shard.called("prefill"))
        healthy = await batcher.health()

    assert healthy
    assert len(shard.called("prefill")) == num_prefills + 1


async def test_reliability_I9_the_health_probe_waits_for_the_step_in_flight():
    gate, clock = Gate("decode"), Clock()
    shard = ScriptedShard(gate=gate)
    async with running(shard, now_ns=clock) as (batcher, _, _):
        reader = asyncio.create_task(read(batcher.submit(valid_request(4, 4))))
        await gate.reached.wait()
        clock.now_ns += 2_000_000_000
        probe = asyncio.create_task(batcher.health())
        await quiet()
        asked_early = bool(shard.called("health"))
        gate.opened.set()
        await reader

        assert await probe
        assert not asked_early


async def test_the_next_call_is_sent_before_the_readers_run():
    order = []

    async def leave(method):
        order.append(method)

    async def gate(method):
        await asyncio.create_task(leave(method))  # as grpc does

    async with running(ScriptedShard(say("a"), gate=gate)) as (batcher, _, _):
        stream = batcher.submit(valid_request(4, 4))
        order.append((await anext(stream)).token.text)
        order.append((await anext(stream)).token.text)

    assert order == ["prefill", "decode", "a", "</s>"]


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_the_next_call_is_sent_before_tokens_are_written_at_once(num_ranks):
    order = []

    async def send(method):
        order.append(method)

    async def gate(method):
        await asyncio.create_task(send(method))  # as grpc does

    ranks = [ScriptedShard(say("a", "b"), gate=gate, rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
    async with running(ShardGroup(ranks)) as (batcher, _, _):
        stream = batcher.submit(valid_request(4, 4))
        stream.writer = lambda generation: order.append(generation.tokens.texts[0]) is None
        events = await read(stream)

    assert [type(event) for event in events] == [Finished]
    assert order == [*["prefill"] * num_ranks, *["decode"] * num_ranks, "a", *["decode"] * num_ranks, "b"]


async def test_tokens_that_the_writer_does_not_take_reach_the_reader_in_order():
    texts = []

    def write(generation):
        text = generation.tokens.texts[0]
        if text == "fails":
            raise ValueError(text)
        if text == "refused":
            return False
        texts.append(text)
        return True

    async with running(ScriptedShard(say("a", "fails", "b", "refused", "c"))) as (batcher, _, _):
        stream = batcher.submit(valid_request(4, 9))
        stream.writer = write
        async for event in stream:
            texts.append(f"read {event.token.text}")
            await quiet()  # a slow reader: the next tokens wait behind it

    assert [text.removeprefix("read ") for text in texts] == ["a", "fails", "b", "refused", "c", "</s>"]
    assert {"read fails", "read refused", "read </s>"} <= set(texts)


async def test_the_observer_gets_batches_calls_and_tokens():
    observer = Recorder()
    shard = ScriptedShard(say("a", "b"))
    async with running(shard, observer=observer, use_prefix_caching=False) as (batcher, _, _):
        await asyncio.gather(*(read(batcher.submit(valid_request(4, 3))) for _ in range(2)))
        await quiet()

    assert observer.batches == [(2, None, 8, 0)]
    assert observer.counts == {
        "call prefill": 1, "done prefill": 1, "call decode": 2, "done decode": 2, "skipped 0": 6,
        "tokens of prefill": 2, "tokens of decode": 4,
    }  # fmt: skip
    assert observer.queue[:2] == [1, 2]
    assert observer.queue[-1] == 0
    assert (2, 32) in observer.running
    assert observer.running[-1] == (0, 0)


async def test_cached_input_tokens_are_reported_at_the_end():
    shard = ScriptedShard(say("a"))
    scheduler = Scheduler(options(use_prefix_caching=True, supports_chunking=True))
    batcher = Batcher(shard, scheduler)
    loop = asyncio.create_task(batcher.run())
    request = valid_request(40, 3)

    first, second = (await read(batcher.submit(request)))[-1], (await read(batcher.submit(request)))[-1]
    loop.cancel()

    assert (first.cached_input_tokens, second.cached_input_tokens) == (0, 32)
