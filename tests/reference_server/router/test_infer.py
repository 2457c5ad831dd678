import asyncio
from typing import Any

import pytest

from reference_server.errors import GenerationError, OverloadedError, ShardError, ValidationError
from reference_server.messages import Request
from reference_server.router.generation_stream import Finished, GeneratedToken, TokenArrived
from reference_server.router.infer import CompletedGeneration, Permits, all_or_nothing
from reference_server.router.schemas.tgi import GenerateParameters
from reference_server.router.validation.request_rules import GenerationLimits
from reference_server.router.validation.validator import GenerateCall
from tests.support.servers.serving import Served, endless, serve
from tests.support.wire.scripted_shard import Reply, ScriptedShard


def call(prompt: str = "hello", **parameters: Any) -> GenerateCall:
    return GenerateCall(prompt, GenerateParameters(**parameters))


def failures(served: Served, err: str) -> float:
    return served.services.metrics.request_failure.value(err)


def test_permits_come_back_however_their_block_ends():
    permits = Permits(1)
    with pytest.raises(RuntimeError), permits.take():
        raise RuntimeError
    with permits.take(), pytest.raises(OverloadedError), permits.take():
        pass

    assert permits.free == 1


async def test_a_permit_is_taken_before_validation():
    async with serve(permits=0) as served:
        with pytest.raises(OverloadedError):
            await served.services.infer.generate(call(""))

        assert (failures(served, "overloaded"), failures(served, "validation")) == (1, 0)


async def test_scheduling_S35_with_every_permit_taken_good_and_bad_calls_are_refused_alike():
    opened = asyncio.Event()

    async def hold(method: str) -> None:
        if method == "prefill":
            await opened.wait()

    async with serve(shard=ScriptedShard(gate=hold), permits=2) as served:
        holders = [asyncio.create_task(served.generate()) for _ in range(2)]
        while served.services.infer.permits.free:  # noqa: ASYNC110
            await asyncio.sleep(0)

        refused = [await served.generate("good"), await served.generate("long " * 5000)]

        assert [answer.status_code for answer in refused] == [429, 429]
        assert failures(served, "overloaded") == 2
        opened.set()
        assert [(await holder).status_code for holder in holders] == [200, 200]
        assert len(served.requests) == 2


async def test_a_refused_request_holds_no_permit():
    async with serve(permits=1) as served:
        with pytest.raises(ValidationError):
            await served.services.infer.generate(call(""))

        assert served.services.infer.permits.free == 1
        assert failures(served, "validation") == 1


async def test_a_request_that_could_never_run_is_a_validation_failure():
    blocks = 65_536 // 16 - 1  # block 0 is reserved
    limits = GenerationLimits(max_input_tokens=65_535, max_total_tokens=65_536)
    async with serve(limits=limits) as served:
        with pytest.raises(ValidationError, match=f"need {blocks + 1} blocks of the .* has {blocks}"):
            await served.services.infer.generate(call("word " * 65_000, max_new_tokens=535))

        assert failures(served, "validation") == 1


async def test_hardening_R11_a_permit_is_free_when_its_generation_has_ended_unread():
    async with serve(script=lambda _: Reply((" a", " b"))) as served:
        permits = served.services.infer.permits
        async with served.services.infer.start(call(max_new_tokens=2)) as running:
            held = permits.free
            while permits.free < 128:  # noqa: ASYNC110
                await asyncio.sleep(0)
            events = [event async for event in running]

    assert (held, permits.free, len(events)) == (127, 128, 2)


async def test_hardening_R11_a_permit_is_held_between_segments():
    limits = GenerationLimits(max_input_tokens=2000, max_total_tokens=4096)
    async with serve(script=endless, limits=limits) as served:
        permits = served.services.infer.permits
        async with served.services.infer.start(call(max_new_tokens=1025)) as running:
            events = aiter(running)
            for _ in range(1024):
                await anext(events)
            between = permits.free
            last = await anext(events)

    assert (between, isinstance(last, Finished), permits.free) == (127, True, 128)


async def test_leaving_a_generation_cancels_it():
    async with serve(script=endless) as served:
        async with served.services.infer.start(call(max_new_tokens=1000)) as running:
            async for event in running:
                assert isinstance(event, TokenArrived)
                break
        while served.shard.cached_ids:  # noqa: ASYNC110
            await asyncio.sleep(0)

        assert failures(served, "dropped") == 1
        assert served.services.infer.permits.free == 128


async def test_best_of_fails_as_one_and_cancels_the_others():
    def script(request: Request) -> Reply:
        return Reply((" x",) * 1000, fail_after=None)

    async with serve(script=script, permits=1) as served:
        with pytest.raises(OverloadedError):
            await served.services.infer.generate_best(call(best_of=2, do_sample=True))

        assert served.services.infer.permits.free == 1


async def test_best_of_counts_its_limits_before_any_permit():
    async with serve(permits=0) as served:
        with pytest.raises(ValidationError, match="`best_of` must be > 0 and <= 2"):
            await served.services.infer.generate_best(call(best_of=3, do_sample=True))

        assert failures(served, "validation") == 0


async def test_ties_go_to_the_first_generation():
    async with serve() as served:
        best, others = await served.services.infer.generate_best(call(best_of=2, do_sample=True, max_new_tokens=1))
        first, second = served.requests

    assert best.generated.seed == first.parameters.seed
    assert others[0].generated.seed == second.parameters.seed


async def test_a_failed_later_segment_fails_the_generation():
    limits = GenerationLimits(max_input_tokens=2000, max_total_tokens=4096)

    def script(request: Request) -> Reply:
        return Reply((" x",) * 1100, fail_after=3 if len(request.text) > 100 else None)

    async with serve(script=script, limits=limits) as served:
        with pytest.raises(GenerationError, match="was scripted to fail"):
            await served.services.infer.generate(call(max_new_tokens=1500))


async def test_a_shard_error_is_a_generation_error():
    shard = ScriptedShard()
    shard.failures["prefill"] = ShardError("gone")
    async with serve(shard=shard) as served:
        with pytest.raises(GenerationError, match="Server error: gone"):
            await served.services.infer.generate(call())


async def test_segments_keep_the_first_ones_times():
    limits = GenerationLimits(max_input_tokens=2000, max_total_tokens=4096)
    async with (
        serve(script=endless, limits=limits) as served,
        served.services.infer.start(call(max_new_tokens=1030)) as running,
    ):
        events = [event async for event in running]

    (end,) = [event for event in events if isinstance(event, Finished)]
    assert len(events) == end.generated_text.generated_tokens == 1030
    assert isinstance(events[1023], TokenArrived)
    assert end.queued_ns <= end.started_ns
    assert running.input_len == 2


def test_the_mean_is_single_precision():
    answer = CompletedGeneration(1, [GeneratedToken(1, "a", logprob, False) for logprob in (-0.1, -0.2, -0.4)])

    assert answer.mean_logprob == pytest.approx(-0.2333333, abs=1e-6)
    assert answer.mean_logprob != sum((-0.1, -0.2, -0.4)) / 3


async def test_the_first_failure_is_raised_and_cancels_the_rest():
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fail() -> None:
        raise OverloadedError

    with pytest.raises(OverloadedError):
        await all_or_nothing([wait(), fail()])

    assert cancelled.is_set()
