"""Permits, blocks and tokens under any interleaving of arrivals, cancellations, steps and failures.

The router from `Infer` down to a scripted shard that answers one call at a time, when the test releases it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference_server.errors import GenerationError, OverloadedError, ShardConnectionError, ShardError
from reference_server.router.batching import Batcher
from reference_server.router.infer import CompletedGeneration, Infer, Permits
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.schemas.tgi import GenerateParameters
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.validation.request_rules import GenerationLimits
from reference_server.router.validation.validator import GenerateCall, Validator
from tests.support.models.word_tokenizer import WordTokenizer
from tests.support.wire.scripted_shard import INFO, Reply, ScriptedShard

PERMITS = 6
SPINS = 60  # turns of the event loop after which nothing moves without another answer of the shard
OPTIONS = {
    "chunked": {"supports_chunking": True, "use_prefix_caching": True},
    "whole": {"waiting_served_ratio": 0.3, "max_waiting_tokens": 2, "use_prefix_caching": True},
    "small batches": {"max_batch_size": 2, "waiting_served_ratio": 0.0},
}


class InlineExecutor(Executor):
    """Runs at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class InferMachine(RuleBasedStateMachine):
    """Every accepted request ends once: with all of its own tokens, an error, or a cancellation."""

    @initialize(policy=st.sampled_from(sorted(OPTIONS)))
    def begin(self, policy: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.answers = asyncio.Semaphore(0)
        chunks = "supports_chunking" in OPTIONS[policy]
        self.shard = ScriptedShard(
            lambda request: Reply(tuple(f"{request.text.split()[0]}:{i} " for i in range(6))),
            info=INFO if chunks else type(INFO)(requires_padding=False, dtype="f", device_type="cpu"),
            gate=self.hold,
            max_prefill_tokens=32,
        )
        self.scheduler = Scheduler(SchedulerOptions(32, 16 * 12, block_size=16, **OPTIONS[policy]))
        batcher = Batcher(self.shard, self.scheduler)
        limits = GenerationLimits(max_input_tokens=32, max_total_tokens=64)
        self.permits = Permits(PERMITS)
        validator = Validator(WordTokenizer(), limits, InlineExecutor())
        self.infer = Infer(batcher, validator, self.permits, Metrics(32, 64))
        self.batching = self.loop.create_task(batcher.run())
        self.tasks: dict[str, asyncio.Task[CompletedGeneration]] = {}
        self.wanted: dict[str, int] = {}

    async def hold(self, _: str) -> None:
        await self.answers.acquire()

    def spin(self) -> None:
        async def turn() -> None:
            for _ in range(SPINS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())

    @rule(words=st.integers(1, 30), new=st.integers(1, 8))
    def ask(self, words: int, new: int) -> None:
        name = f"r{len(self.tasks)}"
        prompt = " ".join([name, *(f"w{i}" for i in range(words - 1))])
        call = GenerateCall(prompt, GenerateParameters(max_new_tokens=new))
        is_full = self.permits.free == 0
        self.wanted[name] = new
        self.tasks[name] = self.loop.create_task(self.infer.generate(call))
        self.spin()
        assert is_full == (self.tasks[name].done() and isinstance(self.tasks[name].exception(), OverloadedError))

    @precondition(lambda self: any(not task.done() for task in self.tasks.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        live = [name for name, task in self.tasks.items() if not task.done()]
        self.tasks[data.draw(st.sampled_from(live))].cancel()
        self.spin()

    @rule(count=st.integers(1, 3))
    def answer(self, count: int) -> None:
        for _ in range(count):
            self.answers.release()
            self.spin()

    @rule(method=st.sampled_from(["prefill", "decode", "filter_batch", "clear_cache"]), link=st.booleans())
    def fail(self, method: str, link: bool) -> None:
        is_step = method in ("prefill", "decode")
        error = ShardConnectionError("cut") if link or not is_step else ShardError("broken")
        self.shard.failures = {method: error}

    @invariant()
    def permits_are_conserved(self) -> None:
        live = sum(not task.done() for task in self.tasks.values())
        assert self.permits.free + live == PERMITS

    @invariant()
    def blocks_are_conserved(self) -> None:
        allocator = self.scheduler.queue.admission.allocator  # type: ignore[attr-defined]
        own = []
        for entry in self.scheduler.entries:
            allocation = entry.admitted.allocation  # type: ignore[union-attr]
            own += allocation.blocks[allocation.prefix_len // 16 :]  # type: ignore[union-attr]
        nodes = allocator.trie.nodes() if self.scheduler.options.use_prefix_caching else []
        cached = [block for node in nodes for block in node.blocks]
        assert sorted([*allocator.free_blocks, *own, *cached]) == list(range(1, allocator.capacity + 1))

    @invariant()
    def every_answer_is_whole_and_its_own(self) -> None:
        for name, task in self.tasks.items():
            if not task.done() or task.cancelled():
                continue
            error = task.exception()
            if error is not None:
                assert isinstance(error, GenerationError | OverloadedError)
                continue
            words = [*(f"{name}:{i} " for i in range(6)), "</s>"][: self.wanted[name]]
            assert [token.text for token in task.result().tokens] == words

    def teardown(self) -> None:
        """Without further events every request ends and all permits and blocks are free."""
        if not hasattr(self, "loop"):
            return
        self.shard.failures = {}
        for _ in range(400):
            if not self.scheduler.entries and not self.scheduler.queue_size and not self.shard.cached_ids:
                break
            self.answer(1)
        assert all(task.done() for task in self.tasks.values())
        assert self.permits.free == PERMITS
        assert (self.scheduler.entries, self.scheduler.queue_size) == ((), 0)
        assert not self.batching.done()
        self.batching.cancel()
        self.spin()
        self.loop.close()


class LongInferMachine(InferMachine):
    """The same, more often."""


# 40 examples of up to 50 steps in CI, some 1,800 in all; 400 in the long run.
InferMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, derandomize=True)
LongInferMachine.TestCase.settings = settings(InferMachine.TestCase.settings, max_examples=400)
test_no_interleaving_loses_a_permit_a_block_or_a_token = InferMachine.TestCase
test_no_interleaving_loses_one_at_length = pytest.mark.slow(LongInferMachine.TestCase)
