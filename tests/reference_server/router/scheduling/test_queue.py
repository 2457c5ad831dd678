"""Forming a batch from the queue."""

from dataclasses import replace

import pytest

from reference_server.errors import ValidationError
from reference_server.router.scheduling.admission import TokenBudget
from reference_server.router.scheduling.queue import FormedBatch, Queue
from reference_server.router.scheduling.scheduler_options import SchedulerOptions, WireVersion, make_admission
from tests.support.wire.valid_requests import valid_request

AMPLE = 1 << 20


def make_queue(total_tokens: int, *, block_size: int = 1, prefill_tokens: int = AMPLE, **options) -> Queue:
    settings = SchedulerOptions(prefill_tokens, total_tokens, block_size=block_size, **options)
    return Queue(make_admission(settings))


def add(queue: Queue, *lengths: tuple[int, int], **options):
    return [queue.append(valid_request(i, n, **options), now_ns=0) for i, n in lengths]


def form(queue: Queue, min_size, max_size, prefill_tokens, total_tokens, now_ns=1) -> FormedBatch | None:
    return queue.next_batch(TokenBudget(prefill_tokens, total_tokens), now_ns, min_size=min_size, max_size=max_size)


def ids(formed: FormedBatch | None) -> list[int] | None:
    return None if formed is None else [request.id for request in formed.batch.requests]


def waiting(queue: Queue) -> list[int]:
    return [entry.id for entry in queue.waiting]


def finish(queue: Queue, formed: FormedBatch) -> None:
    """The batch ran: its prompts were computed."""
    for entry in formed.entries:
        entry.remaining_prefill = 0
        queue.release(entry)


def test_scheduling_S1_two_entries_that_fit_make_batch_0():
    queue = make_queue(24)
    entries = add(queue, (3, 2), (2, 2))

    formed = form(queue, None, None, 5, 24, now_ns=7)

    assert ids(formed) == [0, 1]
    assert (formed.batch.id, formed.batch.size, formed.batch.max_tokens, formed.batch.max_blocks) == (0, 2, 5, 4)
    assert [request.blocks for request in formed.batch.requests] == [(20, 21, 22, 23), (17, 18, 19)]
    assert [request.num_slots for request in formed.batch.requests] == [4, 3]
    assert [entry.started_ns for entry in entries] == [7, 7]
    assert queue.append(valid_request(1, 1), now_ns=0).id == 2


def test_scheduling_S2_a_request_that_does_not_fit_heads_the_next_batch():
    queue = make_queue(24)
    add(queue, (3, 2), (2, 2))

    first = form(queue, None, None, 4, 24)
    add(queue, (3, 1))
    second = form(queue, None, None, 5, 24)

    assert (first.batch.id, ids(first)) == (0, [0])
    assert (second.batch.id, ids(second)) == (1, [1, 2])


def test_scheduling_S3_fewer_than_the_minimum_changes_nothing():
    queue = make_queue(24)
    add(queue, (3, 2))

    assert form(queue, 2, None, 9, 9) is None
    assert waiting(queue) == [0]
    assert form(queue, 1, None, 9, 9).batch.id == 0


def test_scheduling_S4_a_maximum_leaves_the_rest():
    queue = make_queue(24)
    add(queue, (3, 2), (2, 2))

    assert ids(form(queue, None, 1, 9, 9)) == [0]
    assert waiting(queue) == [1]


def test_scheduling_S5_a_maximum_of_zero_forms_nothing():
    queue = make_queue(24)
    add(queue, (1, 1))

    assert form(queue, None, 0, 2, 2) is None
    assert waiting(queue) == [0]


@pytest.mark.parametrize("schema", WireVersion)
def test_scheduling_S6_S7_a_dead_entry_leaves_at_once_and_is_counted(schema):
    queue = make_queue(24, schema=schema)
    dead, _ = add(queue, (1, 1), (1, 1))
    queue.discard(dead)
    queue.discard(dead)

    assert form(queue, None, None, 0, 0) is None
    assert (waiting(queue), queue.num_discarded) == ([1], 1)


def test_hardening_R8_the_fewest_entries_of_a_batch_are_active_ones():
    queue = make_queue(24)
    *dead, _ = add(queue, *[(1, 1)] * 5)
    for entry in dead:
        queue.discard(entry)

    assert form(queue, 2, None, 10, 20) is None
    assert ids(form(queue, 1, None, 10, 20)) == [4]


def test_scheduling_S8_padded_rows_cost_the_longest():
    queue = make_queue(AMPLE, requires_padding=True)
    add(queue, (4, 3), (6, 2), (2, 5))

    formed = form(queue, None, None, 18, 40)

    assert ids(formed) == [0, 1, 2]
    assert formed.batch.max_tokens == 28
    assert all(request.blocks == () and request.num_slots == 0 for request in formed.batch.requests)


def test_scheduling_S9_a_padded_entry_over_the_total_stays_at_the_front():
    queue = make_queue(AMPLE, requires_padding=True)
    add(queue, (4, 3), (6, 2), (2, 5))

    assert ids(form(queue, None, None, 18, 27)) == [0, 1]
    assert waiting(queue) == [2]


def test_scheduling_S10_padded_drafts_are_counted_once_per_batch():
    queue = make_queue(AMPLE, requires_padding=True, speculate=3)
    add(queue, (2, 4), (3, 1))

    assert form(queue, None, None, 8, 8) is None
    formed = form(queue, None, None, 8, 14)

    assert ids(formed) == [0, 1]
    assert formed.batch.max_tokens == 11


def test_scheduling_S11_unpadded_v3_tests_the_total_for_zero_only():
    queue = make_queue(64)
    add(queue, (4, 4), (4, 4))

    formed = form(queue, None, None, 100, 1)

    assert ids(formed) == [0, 1]
    assert formed.batch.max_tokens == 8
    assert [request.blocks for request in formed.batch.requests] == [tuple(range(57, 64)), tuple(range(50, 57))]


def test_scheduling_S11_v2_enforces_the_total():
    queue = make_queue(64, schema=WireVersion.V2)
    add(queue, (4, 4), (4, 4))

    assert form(queue, None, None, 100, 1) is None
    assert waiting(queue) == [0, 1]


@pytest.mark.parametrize(("total_tokens", "taken"), [(96, [0, 1]), (95, [0])])
def test_scheduling_S12_v2_counts_whole_blocks(total_tokens, taken):
    queue = make_queue(AMPLE, block_size=16, schema=WireVersion.V2)
    add(queue, (10, 20), (17, 5))

    formed = form(queue, None, None, AMPLE, total_tokens)

    assert ids(formed) == taken
    assert len(taken) == 1 or formed.batch.max_tokens == 96


def test_scheduling_S13_the_head_may_take_every_block():
    queue = make_queue(160, block_size=16)
    add(queue, (100, 40), (1, 1))

    formed = form(queue, None, None, 200, 160)

    assert ids(formed) == [0]
    assert formed.batch.requests[0].blocks == tuple(range(1, 10))
    assert waiting(queue) == [1]


def test_scheduling_S14_a_request_that_never_fits_is_refused_on_arrival():
    queue = make_queue(160, block_size=16)

    with pytest.raises(ValidationError, match="need 10 blocks of the key-value cache, which has 9"):
        add(queue, (100, 60))
    (behind,) = add(queue, (1, 1))

    assert behind.id == 0
    assert ids(form(queue, None, None, 200, 160)) == [0]


@pytest.mark.parametrize("supports_chunking", [False, True])
def test_scheduling_S15_the_prefill_budget_is_rounded_up_to_blocks(supports_chunking):
    queue = make_queue(1600, block_size=16, supports_chunking=supports_chunking)
    add(queue, (20, 4), (12, 4), (1, 1))

    formed = form(queue, None, None, 20, 1600)

    assert ids(formed) == [0, 1]
    assert waiting(queue) == [2]


def test_scheduling_S20_a_cached_prompt_costs_its_last_token():
    queue = make_queue(32, use_prefix_caching=True)
    add(queue, (4, 3), ids=(7, 8, 9, 10))
    finish(queue, form(queue, None, None, 8, 32))
    add(queue, (4, 3), ids=(7, 8, 9, 10))
    add(queue, (7, 2))

    formed = form(queue, None, None, 8, 32)

    assert ids(formed) == [1, 2]
    assert [request.cache_len for request in formed.batch.requests] == [3, 0]
    assert formed.batch.max_tokens == 8
    assert [entry.cached_input_tokens for entry in formed.entries] == [3, 0]


def test_scheduling_S21_prompt_details_do_not_feed_the_cache():
    queue = make_queue(32, use_prefix_caching=True)
    add(queue, (4, 3), ids=(7, 8, 9, 10), prefill_logprobs=True)
    finish(queue, form(queue, None, None, 8, 32))
    add(queue, (4, 3), ids=(7, 8, 9, 10))

    assert form(queue, None, None, 8, 32).batch.requests[0].cache_len == 0


def test_scheduling_S24_the_last_prompt_is_cut_to_fill_the_budget():
    queue = make_queue(64, supports_chunking=True)
    add(queue, (6, 5), (8, 5), (3, 1))

    formed = form(queue, None, None, 10, 64)

    assert ids(formed) == [0, 1]
    assert [request.chunk_len for request in formed.batch.requests] == [None, 4]
    assert waiting(queue) == [2]
    assert formed.batch.max_tokens == 6


def test_scheduling_S27_a_batch_below_the_minimum_is_put_back_whole():
    queue = make_queue(24 * 20)
    entries = add(queue, *[(10, 5)] * 12)
    before = queue.waiting

    assert form(queue, 12, None, 110, 1000) is None
    assert queue.waiting == before
    assert all(entry.admitted is None for entry in entries)
    formed = form(queue, 12, None, 120, 1000)
    assert ids(formed) == list(range(12))
    assert formed.batch.id == 0


def test_a_batch_that_is_put_back_leaves_no_cached_prefix():
    queue = make_queue(200, use_prefix_caching=True)
    add(queue, (10, 5), ids=range(10))

    assert form(queue, None, None, 5, 200) is None
    add(queue, (10, 5), ids=range(10))
    assert form(queue, 2, None, 15, 200) is None
    formed = form(queue, None, None, 100, 200)

    assert [request.cache_len for request in formed.batch.requests] == [0, 0]


def test_dead_entries_behind_the_head_are_discarded_on_the_way():
    queue = make_queue(64)
    _, dead, _ = add(queue, (2, 2), (2, 2), (2, 2))
    queue.discard(dead)

    assert ids(form(queue, None, None, 100, 64)) == [0, 2]
    assert queue.num_discarded == 1


def test_the_wire_request_keeps_its_fields_and_gains_an_id_and_blocks():
    queue = make_queue(64)
    request = valid_request(3, 2, adapter_id="poet", top_n_tokens=4, prefill_logprobs=True)
    queue.append(request, now_ns=0)

    (sent,) = form(queue, None, None, 10, 64).batch.requests

    assert replace(sent, id=0, blocks=(), num_slots=0) == request.wire
    assert (sent.id, len(sent.blocks), sent.num_slots) == (0, 4, 4)
    assert (sent.adapter_id, sent.top_n_tokens, sent.prefill_logprobs) == ("poet", 4, True)
