"""The Scheduler, driven by hand and over a ScriptedShard, without an event loop."""

import doctest
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference_server.errors import ShardError
from reference_server.messages import (
    CachedBatch,
    FinishReason,
    GeneratedText,
    Generation,
    ModelInfo,
    StepResult,
    Tokens,
)
from reference_server.router.scheduling import scheduler as scheduler_module
from reference_server.router.scheduling.blocks import round_up
from reference_server.router.scheduling.calls import Clear, ConcatReason, Decode, Filter, Idle, Prefill
from reference_server.router.scheduling.scheduler import Scheduler, min_join_size
from reference_server.router.scheduling.scheduler_options import SchedulerOptions, WireVersion
from tests.support.wire.scripted_shard import Reply, ScriptedShard, say
from tests.support.wire.valid_requests import valid_request


def make_scheduler(prefill_tokens=1000, total_tokens=4000, **options) -> Scheduler:
    return Scheduler(SchedulerOptions(prefill_tokens, total_tokens, **{"block_size": 1} | options))


def add(scheduler: Scheduler, *lengths: tuple[int, int]):
    return [scheduler.append(valid_request(i, n), now_ns=0) for i, n in lengths]


def step(batch: CachedBatch | None, request_ids, ended=()) -> StepResult:
    """One token for each request."""
    return StepResult(tuple(generation(i, ended=i in ended) for i in request_ids), batch)


def generation(request_id: int, ended: bool = False) -> Generation:
    text = GeneratedText("a", 1, FinishReason.LENGTH) if ended else None
    return Generation(request_id, Tokens((5,), (-1.0,), ("a",), (False,)), generated_text=text)


def receipt(batch_id: int, request_ids, max_tokens: int = 10, current_tokens: int | None = None) -> CachedBatch:
    ids = tuple(request_ids)
    return CachedBatch(batch_id, ids, max_tokens, len(ids) if current_tokens is None else current_tokens)


def start(scheduler: Scheduler, count: int, **fields) -> CachedBatch:
    """`count` requests are prefilled and run as batch 0."""
    add(scheduler, *[(1, 50)] * count)
    call = scheduler.next_call(0)
    running = receipt(call.batch.id, range(count), **fields)
    scheduler.on_reply(call, step(running, range(count)))
    return running


def decode(scheduler: Scheduler) -> Decode:
    """One decode step in which nothing ends."""
    call = scheduler.next_call(0)
    assert isinstance(call, Decode)
    running = scheduler.running
    scheduler.on_reply(call, step(running, running.request_ids))
    return call


def run_now(coroutine):
    """The result of a coroutine that never suspends."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value


def carry(shard: ScriptedShard, call):
    match call:
        case Prefill():
            return run_now(shard.prefill(call.batch, call.cached))
        case Decode():
            return run_now(shard.decode(call.batches))
        case Filter():
            return run_now(shard.filter_batch(call.batch_id, call.request_ids))
        case Clear():
            return run_now(shard.clear_cache(call.batch_id))


def test_nothing_to_do_is_idle():
    assert make_scheduler().next_call(0) == Idle()


def test_scheduling_S25_a_prompt_joins_by_the_tokens_left_and_is_merged():
    scheduler = make_scheduler(prefill_tokens=10, supports_chunking=True)
    running = start(scheduler, 1, current_tokens=7)
    add(scheduler, (8, 5))

    call = scheduler.next_call(0)

    assert isinstance(call, Prefill)
    assert (call.cached, call.reason) == (running, ConcatReason.CHUNKING)
    assert [request.chunk_len for request in call.batch.requests] == [3]
    merged = receipt(0, [0, 1], current_tokens=6)
    scheduler.on_reply(call, step(merged, [0]))
    assert scheduler.next_call(0) == Decode((merged,))


def test_scheduling_S25_a_full_forward_admits_no_entry():
    scheduler = make_scheduler(prefill_tokens=10, supports_chunking=True)
    running = start(scheduler, 1, current_tokens=10)
    add(scheduler, (8, 5))

    assert scheduler.next_call(0) == Decode((running,))


@pytest.mark.parametrize(("queued", "joins"), [(11, False), (12, True)])
def test_scheduling_S26_newcomers_need_the_ratio(queued, joins):
    scheduler = make_scheduler(waiting_served_ratio=1.2)
    running = start(scheduler, 10)
    decode(scheduler)  # waiting steps: 2
    add(scheduler, *[(1, 1)] * queued)

    call = scheduler.next_call(0)

    if joins:
        assert (call.batch.size, call.reason, call.cached) == (12, ConcatReason.BACKPRESSURE, None)
    else:
        assert call == Decode((running,))


def test_scheduling_S28_a_small_ratio_sets_no_minimum():
    scheduler = make_scheduler(waiting_served_ratio=0.3)
    start(scheduler, 3)
    add(scheduler, (1, 1))

    call = scheduler.next_call(0)

    assert (call.batch.size, call.reason) == (1, ConcatReason.BACKPRESSURE)


def test_scheduling_S29_a_long_wait_overrides_the_ratio():
    scheduler = make_scheduler(waiting_served_ratio=1.2, max_waiting_tokens=20)
    start(scheduler, 10)
    add(scheduler, (1, 1))

    for _ in range(19):
        decode(scheduler)
    call = scheduler.next_call(0)

    assert (call.batch.size, call.reason) == (1, ConcatReason.WAIT_EXCEEDED)


def test_a_stride_ends_where_a_waiting_entry_may_join():
    scheduler = make_scheduler(waiting_served_ratio=1.2, max_waiting_tokens=20)
    running = start(scheduler, 10)
    decode(scheduler)
    add(scheduler, (1, 1))

    call = scheduler.next_call(0)
    assert scheduler.stride() == 18
    scheduler.on_reply(call, step(running, running.request_ids), num_steps=18)

    assert scheduler.next_call(0).reason == ConcatReason.WAIT_EXCEEDED


def test_a_stride_has_no_end_while_the_waiting_entry_does_not_fit():
    scheduler = make_scheduler(waiting_served_ratio=1.2, max_waiting_tokens=2)
    start(scheduler, 10, max_tokens=4000)
    decode(scheduler)
    add(scheduler, (1, 1))

    assert isinstance(scheduler.next_call(0), Decode)
    assert scheduler.stride() is None


@pytest.mark.parametrize(("running", "joining"), [(4, None), (3, 1)])
def test_scheduling_S30_a_maximum_size_limits_the_entries_that_join(running, joining):
    scheduler = make_scheduler(max_batch_size=4, waiting_served_ratio=0)
    start(scheduler, running)
    add(scheduler, (1, 1), (1, 1))

    call = scheduler.next_call(0)

    assert getattr(call, "batch", None) is None if joining is None else call.batch.size == joining


def test_scheduling_S31_a_used_up_total_admits_no_entry():
    scheduler = make_scheduler(total_tokens=4000, waiting_served_ratio=0)
    running = start(scheduler, 1, max_tokens=4000)
    add(scheduler, (1, 1))

    assert scheduler.next_call(0) == Decode((running,))


def test_scheduling_S32_a_failed_join_ends_the_new_entries_only():
    scheduler = make_scheduler(waiting_served_ratio=0)
    running = start(scheduler, 2)
    new = add(scheduler, (1, 1), (1, 1))
    call = scheduler.next_call(0)

    failed = scheduler.on_error(call)

    assert failed == new
    assert scheduler.next_call(0) == Clear(call.batch.id, after_error=True)
    assert scheduler.next_call(0) == Decode((running,))


def test_scheduling_S32_a_failed_chunked_join_ends_everyone_and_clears_both_ids():
    scheduler = make_scheduler(supports_chunking=True)
    start(scheduler, 2)
    old = list(scheduler.entries)
    new = add(scheduler, (1, 1))
    call = scheduler.next_call(0)

    failed = scheduler.on_error(call)

    assert failed == [*new, *old]
    assert scheduler.next_call(0) == Clear(call.batch.id, after_error=True)
    assert scheduler.next_call(0) == Clear(0, after_error=True)
    assert scheduler.next_call(0) == Idle()


def test_scheduling_S33_ended_rows_are_filtered_out():
    scheduler = make_scheduler()
    running = start(scheduler, 3)

    scheduler.on_reply(scheduler.next_call(0), step(running, range(3), ended=[1]))

    call = scheduler.next_call(0)
    assert call == Filter(0, (0, 2))
    smaller = receipt(0, [0, 2])
    scheduler.on_reply(call, smaller)
    assert scheduler.next_call(0) == Decode((smaller,))


def test_scheduling_S33_a_batch_without_live_requests_is_cleared():
    scheduler = make_scheduler()
    running = start(scheduler, 3)
    call = scheduler.next_call(0)
    for entry in scheduler.entries:
        scheduler.cancel(entry)

    deliveries = scheduler.on_reply(call, step(running, range(3)))

    assert (list(deliveries.generations), deliveries.num_dropped) == ([], 3)
    assert scheduler.next_call(0) == Clear(0)
    assert scheduler.next_call(0) == Idle()


def test_a_joined_batch_is_merged_by_the_decode_of_the_same_turn():
    scheduler = make_scheduler(waiting_served_ratio=0)
    running = start(scheduler, 2)
    add(scheduler, (1, 5))
    call = scheduler.next_call(0)
    joined = receipt(call.batch.id, [2])

    scheduler.on_reply(call, step(joined, [2]))
    merging = scheduler.next_call(0)
    merged = receipt(0, [0, 1, 2])
    deliveries = scheduler.on_reply(merging, step(merged, range(3)))

    assert merging == Decode((running, joined))
    assert [entry.id for entry, _ in deliveries.generations] == [0, 1, 2]
    assert scheduler.running == merged


def test_a_joined_batch_that_ends_at_once_leaves_the_old_one_alone():
    scheduler = make_scheduler(waiting_served_ratio=0)
    running = start(scheduler, 2)
    add(scheduler, (1, 1))

    scheduler.on_reply(scheduler.next_call(0), step(None, [2], ended=[2]))

    assert scheduler.next_call(0) == Decode((running,))


def test_a_joined_batch_is_filtered_before_it_is_merged():
    scheduler = make_scheduler(waiting_served_ratio=0)
    running = start(scheduler, 1)
    add(scheduler, (1, 1), (1, 5))
    call = scheduler.next_call(0)
    scheduler.on_reply(call, step(receipt(1, [1, 2]), [1, 2], ended=[1]))

    filtering = scheduler.next_call(0)
    scheduler.on_reply(filtering, receipt(1, [2]))

    assert filtering == Filter(1, (2,))
    assert scheduler.next_call(0) == Decode((running, receipt(1, [2])))


def test_a_failed_decode_ends_everyone_and_clears_every_part():
    scheduler = make_scheduler(waiting_served_ratio=0)
    start(scheduler, 1)
    add(scheduler, (1, 5))
    call = scheduler.next_call(0)
    scheduler.on_reply(call, step(receipt(1, [1]), [1]))

    failed = scheduler.on_error(scheduler.next_call(0))

    assert [entry.id for entry in failed] == [0, 1]
    assert [scheduler.next_call(0), scheduler.next_call(0)] == [Clear(0, True), Clear(1, True)]
    assert scheduler.next_call(0) == Idle()


def test_a_failed_filter_ends_the_rows_that_were_to_be_kept():
    scheduler = make_scheduler()
    running = start(scheduler, 3)
    scheduler.on_reply(scheduler.next_call(0), step(running, range(3), ended=[1]))

    failed = scheduler.on_error(scheduler.next_call(0))

    assert [entry.id for entry in failed] == [0, 2]
    assert scheduler.entries == ()


def test_the_queue_is_tried_again_once_the_batch_is_empty():
    scheduler = make_scheduler(max_batch_size=1)
    add(scheduler, (1, 1), (1, 1))
    scheduler.on_reply(scheduler.next_call(0), step(None, [0], ended=[0]))

    assert [request.id for request in scheduler.next_call(0).batch.requests] == [1]


def test_reliability_F6_a_row_missing_from_the_shards_batch_is_lost_alone():
    scheduler = make_scheduler()
    start(scheduler, 3)

    deliveries = scheduler.on_reply(scheduler.next_call(0), step(receipt(0, [0, 2]), [0, 2]))

    assert [entry.id for entry in deliveries.lost] == [1]
    assert [entry.id for entry, _ in deliveries.generations] == [0, 2]
    assert scheduler.next_call(0) == Decode((receipt(0, [0, 2]),))


def test_reliability_F15_a_client_that_leaves_during_its_prompt_is_dropped_at_the_next_reply():
    scheduler = make_scheduler(prefill_tokens=4, total_tokens=64, supports_chunking=True)
    (entry,) = add(scheduler, (12, 5))
    call = scheduler.next_call(0)
    scheduler.cancel(entry)

    deliveries = scheduler.on_reply(call, step(receipt(0, [0], current_tokens=4), []))

    assert deliveries.num_dropped == 1
    assert entry.admitted is None
    assert scheduler.next_call(0) == Clear(0)


def test_blocks_are_free_before_the_filter_call():
    scheduler = make_scheduler(total_tokens=8)
    add(scheduler, (3, 2), (2, 2))
    scheduler.on_reply(scheduler.next_call(0), step(receipt(0, [0, 1]), [0, 1]))
    scheduler.on_reply(scheduler.next_call(0), step(receipt(0, [0, 1]), [0, 1], ended=[0]))
    (late,) = add(scheduler, (3, 2))

    assert isinstance(scheduler.next_call(0), Filter)
    assert scheduler.queue.next_batch(scheduler.options.limits, 0).entries == (late,)


def test_a_failed_decode_leaves_no_cached_prefix():
    scheduler = make_scheduler(use_prefix_caching=True)
    request = valid_request(10, 5)
    scheduler.append(request, now_ns=0)
    scheduler.on_reply(scheduler.next_call(0), step(receipt(0, [0]), [0]))
    scheduler.on_error(scheduler.next_call(0))
    scheduler.on_reply(scheduler.next_call(0), None)
    scheduler.append(request, now_ns=0)

    assert scheduler.next_call(0).batch.requests[0].cache_len == 0


def test_a_lost_row_leaves_no_cached_prefix():
    scheduler = make_scheduler(use_prefix_caching=True)
    request = valid_request(10, 5)
    scheduler.append(request, now_ns=0)
    scheduler.on_reply(scheduler.next_call(0), step(None, []))
    scheduler.append(request, now_ns=0)

    assert scheduler.next_call(0).batch.requests[0].cache_len == 0


def test_a_turn_starts_afresh_after_a_merged_batch_ended_at_once():
    scheduler = make_scheduler(supports_chunking=True)
    start(scheduler, 1)
    add(scheduler, (1, 1))
    scheduler.on_reply(scheduler.next_call(0), step(None, [0, 1], ended=[0, 1]))
    add(scheduler, (1, 9))
    call = scheduler.next_call(0)
    scheduler.on_reply(call, step(receipt(2, [2]), [2]))
    add(scheduler, (1, 1))

    assert scheduler.next_call(0).reason is ConcatReason.CHUNKING


def test_a_failed_step_leaves_no_cached_prefix():
    scheduler = make_scheduler(use_prefix_caching=True)
    request = valid_request(10, 5)
    for _ in range(2):
        scheduler.append(request, now_ns=0)
        call = scheduler.next_call(0)
        assert call.batch.requests[0].cache_len == 0
        scheduler.on_error(call)
        assert isinstance(scheduler.next_call(0), Clear)


def test_an_unfinished_prompt_leaves_no_cached_prefix():
    scheduler = make_scheduler(prefill_tokens=4, total_tokens=64, supports_chunking=True, use_prefix_caching=True)
    request = valid_request(12, 5)
    entry = scheduler.append(request, now_ns=0)
    call = scheduler.next_call(0)
    scheduler.cancel(entry)
    scheduler.on_reply(call, step(receipt(0, [0], current_tokens=4), []))
    scheduler.on_reply(scheduler.next_call(0), None)
    scheduler.append(request, now_ns=0)

    assert scheduler.next_call(0).batch.requests[0].cache_len == 0


def test_fail_all_ends_waiting_and_running_entries():
    scheduler = make_scheduler(max_batch_size=1)
    first, second = add(scheduler, (1, 5), (1, 5))
    scheduler.next_call(0)  # its prefill is under way

    assert scheduler.fail_all() == [first, second]
    assert (scheduler.entries, scheduler.queue_size) == ((), 0)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(scheduler_module).failed == 0


@pytest.mark.parametrize(("size", "ratio", "expected"), [(10, 1.2, 12), (3, 0.3, 0), (50, 0.58, 29), (7, 0.0, 0)])
def test_the_ratio_is_multiplied_in_single_precision(size, ratio, expected):
    assert min_join_size(size, ratio) == expected


def words_of(request_id: int) -> tuple[str, ...]:
    return tuple(f"{request_id}:{i} " for i in range(1 + request_id % 7))


def scripted(options: SchedulerOptions, *, drops: bool = False) -> ScriptedShard:
    info = ModelInfo(
        requires_padding=options.requires_padding,
        dtype="torch.float32",
        device_type="cpu",
        support_chunking=options.chunks_prefills,
        use_prefix_caching=options.use_prefix_caching,
        block_size=options.block_size,
    )
    return ScriptedShard(
        lambda request: Reply(words_of(request.id), drop_after=1 if drops and request.id % 5 == 0 else None),
        info=info,
        max_prefill_tokens=options.max_batch_prefill_tokens,
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_shards_current_tokens_agree_with_the_routers_count(seed):
    """Random joins, chunks, filters and cancellations; compared after every step."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    options = SchedulerOptions(
        max_batch_prefill_tokens=rng.randint(3, 40),
        max_batch_total_tokens=block_size * 300,
        block_size=block_size,
        supports_chunking=True,
        use_prefix_caching=rng.random() < 0.5,
    )
    scheduler, shard = Scheduler(options), scripted(options, drops=True)
    prompts = [tuple(range(rng.randint(1, 80))) for _ in range(3)]
    compared = 0
    for turn in range(150):
        if turn < 100 and rng.random() < 0.4:
            ids = rng.choice(prompts) if rng.random() < 0.5 else None
            length = len(ids) if ids else rng.randint(1, 80)
            scheduler.append(valid_request(length, rng.randint(1, 9), ids=ids), now_ns=turn)
        if scheduler.entries and rng.random() < 0.05:
            scheduler.cancel(rng.choice(scheduler.entries))
        call = scheduler.next_call(turn)
        if isinstance(call, Idle):
            continue
        scheduler.on_reply(call, carry(shard, call))
        if scheduler.running is not None and len(scheduler.entries) == scheduler.running.size:
            assert scheduler.expected_current_tokens == scheduler.running.current_tokens
            compared += 1

    assert compared > 30


def test_hardening_R2_only_the_name_of_a_loaded_adapter_divides_the_prefix_cache():
    options = SchedulerOptions(256, 16 * 64, use_prefix_caching=True, adapters=("poet",))
    scheduler, shard = Scheduler(options), scripted(options)
    hits = {}
    for name in (None, "gpt-4o", "llama", "poet"):
        entry = scheduler.append(valid_request(40, 1, ids=range(40), adapter_id=name), now_ns=0)
        call = scheduler.next_call(0)
        scheduler.on_reply(call, carry(shard, call))
        hits[name] = entry.cached_input_tokens

    assert hits == {None: 0, "gpt-4o": 32, "llama": 32, "poet": 0}
    assert scheduler.queue.admission.allocator.trie.adapters == {None, "poet"}


OPTIONS = {
    "paged": SchedulerOptions(64, 16 * 12, block_size=16, waiting_served_ratio=0.6, max_waiting_tokens=3),
    "radix": SchedulerOptions(64, 8 * 20, block_size=8, waiting_served_ratio=0.6, use_prefix_caching=True),
    "chunked": SchedulerOptions(20, 4 * 40, block_size=4, supports_chunking=True),
    "chunked radix": SchedulerOptions(20, 4 * 40, block_size=4, supports_chunking=True, use_prefix_caching=True),
    "padded": SchedulerOptions(64, 200, block_size=1, requires_padding=True, waiting_served_ratio=0.6),
    "v2": SchedulerOptions(64, 200, block_size=16, waiting_served_ratio=0.6, schema=WireVersion.V2, max_batch_size=3),
}


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, cancellations, answers and failures in any order, for every admission policy."""

    @initialize(policy=st.sampled_from(sorted(OPTIONS)))
    def begin(self, policy):
        self.options = OPTIONS[policy]
        self.scheduler = Scheduler(self.options)
        self.shard = scripted(self.options)
        self.call = None
        self.appended, self.ended, self.started = {}, [], []
        self.received, self.received_the_end = {}, set()

    @rule(length=st.integers(1, 40), new=st.integers(1, 9), shares=st.booleans())
    def append(self, length, new, shares):
        request = valid_request(length, new, ids=range(length) if shares else None)
        entry = self.scheduler.append(request, now_ns=0)
        self.appended[entry.id] = entry

    @precondition(lambda self: self.appended)
    @rule(data=st.data())
    def cancel(self, data):
        entry = self.appended[data.draw(st.sampled_from(sorted(self.appended)))]
        if entry in self.scheduler.queue.waiting:
            self.ended.append(entry.id)
        self.scheduler.cancel(entry)

    @precondition(lambda self: self.call is None)
    @rule()
    def ask(self):
        call = self.scheduler.next_call(0)
        if isinstance(call, Prefill):
            self.started += [entry.id for entry in call.entries]
            self.check_budget(call)
        self.call = None if isinstance(call, Idle) else call

    def check_budget(self, call):
        options, requests = self.options, call.batch.requests
        budget = round_up(options.max_batch_prefill_tokens, options.block_size)
        lengths = [entry.request.input_len for entry in call.entries]
        if options.requires_padding:
            assert max(lengths) * len(lengths) <= budget
            return
        computed = sum(
            length - request.cache_len if request.chunk_len is None else request.chunk_len
            for length, request in zip(lengths, requests, strict=True)
        )
        pending = call.cached.current_tokens if call.cached else 0
        assert computed <= budget
        assert computed + pending < budget + options.block_size
        if options.max_batch_size is not None and call.reason is None:
            assert len(requests) <= options.max_batch_size

    @precondition(lambda self: self.call is not None)
    @rule()
    def answer(self):
        call, self.call = self.call, None
        live = {entry.id for entry in self.scheduler.entries}
        deliveries = self.scheduler.on_reply(call, carry(self.shard, call))
        assert not deliveries.lost
        for entry, generation in deliveries.generations:
            self.record(entry, generation)
        self.ended += sorted(live - {entry.id for entry in self.scheduler.entries})

    def record(self, entry, generation):
        """Each request gets its own tokens, in order, none lost or repeated, and none after its last."""
        assert entry.id not in self.received_the_end
        received = self.received.setdefault(entry.id, [])
        received += generation.tokens.texts
        assert received == [*words_of(entry.id), "</s>"][: len(received)]
        if generation.generated_text is not None:
            self.received_the_end.add(entry.id)
            assert generation.generated_text.generated_tokens == len(received)

    @precondition(lambda self: self.call is not None and not isinstance(self.call, Clear))
    @rule()
    def fail(self):
        call, self.call = self.call, None
        self.shard.failures[
            {"Prefill": "prefill", "Decode": "decode", "Filter": "filter_batch"}[type(call).__name__]
        ] = ShardError("broken")
        with pytest.raises(ShardError):
            carry(self.shard, call)
        self.ended += [entry.id for entry in self.scheduler.on_error(call)]

    @invariant()
    def every_entry_is_in_one_place_and_ends_once(self):
        waiting = [entry.id for entry in self.scheduler.queue.waiting]
        running = [entry.id for entry in self.scheduler.entries]
        assert sorted([*waiting, *running, *self.ended]) == sorted(self.appended)

    @invariant()
    def entries_start_in_order_of_arrival(self):
        assert self.started == sorted(self.started)

    @invariant()
    def blocks_are_conserved(self):
        if self.options.requires_padding or self.options.schema is WireVersion.V2:
            return
        allocator = self.scheduler.queue.admission.allocator
        size, own = self.options.block_size, []
        for entry in self.scheduler.entries:
            allocation = entry.admitted.allocation
            own += allocation.blocks[allocation.prefix_len // size :]
        nodes = allocator.trie.nodes() if self.options.use_prefix_caching else []
        cached = [block for node in nodes for block in node.blocks]
        assert sorted([*allocator.free_blocks, *own, *cached]) == list(range(1, allocator.capacity + 1))

    def teardown(self):
        """Without further events every request ends and all blocks are freed."""
        if not hasattr(self, "scheduler"):
            return
        if self.call is not None:
            self.answer()
        for _ in range(500):
            self.ask()
            if self.call is None:
                break
            self.answer()
        assert sorted(self.ended) == sorted(self.appended)
        assert self.shard.cached_ids == {}


class LongSchedulerMachine(SchedulerMachine):
    """The same, more often."""


# 60 examples of up to 50 steps in CI, some 2,600 in all; 400 in the long run.
SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, derandomize=True)
LongSchedulerMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings, max_examples=400)
test_no_interleaving_breaks_the_scheduler = SchedulerMachine.TestCase
test_no_interleaving_breaks_the_scheduler_at_length = pytest.mark.slow(LongSchedulerMachine.TestCase)


def test_every_request_gets_its_own_tokens():
    """No token is lost, repeated or sent to another request."""
    options = SchedulerOptions(32, 16 * 200, supports_chunking=True, use_prefix_caching=True)
    scheduler = Scheduler(options)
    shard = ScriptedShard(lambda request: Reply(tuple(f"{request.id}:{i} " for i in range(5))), max_prefill_tokens=32)
    received: dict[int, str] = {}
    for turn in range(120):
        if turn < 40:
            scheduler.append(valid_request(1 + turn * 7 % 50, 6), now_ns=turn)
        call = scheduler.next_call(turn)
        if isinstance(call, Idle):
            continue
        for entry, generation in scheduler.on_reply(call, carry(shard, call)).generations:
            received[entry.id] = received.get(entry.id, "") + "".join(generation.tokens.texts)

    assert scheduler.entries == ()
    assert received == {i: "".join(f"{i}:{j} " for j in range(5)) + "</s>" for i in range(40)}


def test_scripted_tokens_do_not_depend_on_chunking():
    def run(**options):
        settings = SchedulerOptions(32, 16 * 200, **options)
        scheduler, shard = Scheduler(settings), ScriptedShard(say("x", "y"), max_prefill_tokens=32)
        for _ in range(5):
            scheduler.append(valid_request(30, 4), now_ns=0)
        received = []
        while not isinstance(call := scheduler.next_call(0), Idle):
            received += [
                (entry.id, generation.tokens.texts)
                for entry, generation in scheduler.on_reply(call, carry(shard, call)).generations
            ]
        return sorted(received)

    assert run(supports_chunking=True) == run(waiting_served_ratio=0.0)
