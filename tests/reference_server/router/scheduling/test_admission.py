from reference_server.messages import Image
from reference_server.router.scheduling.admission import (
    Admitted,
    PagedAdmission,
    TokenBudget,
    padded_admission,
    rounded_admission,
)
from reference_server.router.scheduling.blocks import FreeListAllocator
from reference_server.router.scheduling.radix import RadixAllocator
from tests.support.wire.valid_requests import valid_request

AMPLE = TokenBudget(1 << 20, 1 << 20)


def paged(total_tokens=160, *, block_size=16, prefill_tokens=160, **options) -> PagedAdmission:
    allocator = FreeListAllocator(total_tokens, block_size)
    return PagedAdmission(TokenBudget(prefill_tokens, total_tokens), allocator, block_size=block_size, **options)


def test_padded_prefill_costs_rows_times_longest():
    batch = padded_admission(AMPLE).open(TokenBudget(12, 100))

    admitted = [batch.try_admit(valid_request(length, 1)) for length in (4, 6, 2)]

    assert admitted == [Admitted(), Admitted(), None]
    assert batch.max_tokens == 2 * 6 + 2


def test_rounded_counts_a_window_once():
    batch = rounded_admission(AMPLE, block_size=16, window_size=64).open(TokenBudget(100, 1000))

    batch.try_admit(valid_request(60, 100))

    assert batch.max_tokens == 64 + 16


def test_rounded_reserves_room_for_drafts():
    admission = rounded_admission(AMPLE, block_size=16, speculate=3)

    admitted = [admission.open(TokenBudget(100, total)).try_admit(valid_request(16, 16)) for total in (34, 35)]

    assert admitted == [None, Admitted()]


def test_paged_reserves_all_but_the_last_generated_token():
    batch = paged().open(TokenBudget(160, 160))

    exact = batch.try_admit(valid_request(16, 17))

    assert len(exact.allocation.blocks) == 2
    assert exact.allocation.num_slots == 32


def test_paged_reserves_room_for_drafts():
    batch = paged(speculate=3).open(TokenBudget(160, 160))

    assert batch.try_admit(valid_request(16, 17)).allocation.num_slots == 35


def test_a_full_prefix_hit_still_computes_one_token():
    admission = PagedAdmission(AMPLE, RadixAllocator(160, 16), block_size=16)
    request = valid_request(32, 1)
    first = admission.open(AMPLE).try_admit(request)
    admission.release(first, is_computed=True)

    again = admission.open(AMPLE).try_admit(request)

    assert again.allocation.prefix_len == 32
    assert again.cache_len == 31


def test_prompt_details_and_images_neither_read_nor_feed_the_prefix_cache():
    admission = PagedAdmission(AMPLE, RadixAllocator(320, 16), block_size=16)
    plain = valid_request(32, 1)
    admission.release(admission.open(AMPLE).try_admit(plain), is_computed=True)
    details = valid_request(32, 1, ids=plain.input_ids, prefill_logprobs=True)
    picture = valid_request(32, 1, ids=plain.input_ids, chunks=("prompt", Image(b"", "image/png")))

    assert admission.open(AMPLE).try_admit(details).cache_len == 0
    assert admission.open(AMPLE).try_admit(picture).cache_len == 0


def test_a_prompt_is_cut_to_fill_the_budget_when_chunking():
    batch = paged(supports_chunking=True).open(TokenBudget(32, 160))

    first, second = batch.try_admit(valid_request(20, 1)), batch.try_admit(valid_request(20, 1))

    assert (first.chunk_len, second.chunk_len) == (None, 12)
    assert batch.is_full
    assert batch.max_tokens == 20


def test_an_entry_that_waits_for_budget_holds_no_block():
    allocator = FreeListAllocator(160, 16)
    batch = PagedAdmission(AMPLE, allocator, block_size=16).open(TokenBudget(16, 160))
    free_blocks = allocator.free_blocks

    assert batch.try_admit(valid_request(20, 1)) is None
    assert allocator.free_blocks == free_blocks


def test_a_request_too_large_for_an_empty_server_is_refused_with_the_reason():
    too_many_blocks = paged().refusal(valid_request(100, 60))
    too_long_a_prefill = paged(prefill_tokens=30).refusal(valid_request(33, 1))
    too_wide = padded_admission(TokenBudget(10, 100)).refusal(valid_request(11, 1))
    too_many_tokens = rounded_admission(TokenBudget(64, 64), block_size=16).refusal(valid_request(33, 17))

    assert too_many_blocks == (
        "`inputs` tokens + `max_new_tokens` need 10 blocks of the key-value cache, which has 9. "
        "Given: 100 `inputs` tokens and 60 `max_new_tokens`"
    )
    assert "at most 32 tokens (`max_batch_prefill_tokens`)" in too_long_a_prefill
    assert "10 prompt tokens (`max_batch_prefill_tokens`)" in too_wide
    assert "64 in all (`max_batch_total_tokens`)" in too_many_tokens


def test_a_request_that_fits_an_empty_server_is_not_refused():
    assert paged().refusal(valid_request(100, 45)) is None
    assert paged(prefill_tokens=30, supports_chunking=True).refusal(valid_request(33, 1)) is None
    assert padded_admission(TokenBudget(10, 100)).refusal(valid_request(10, 90)) is None
    assert rounded_admission(TokenBudget(64, 64), block_size=16).refusal(valid_request(33, 16)) is None
