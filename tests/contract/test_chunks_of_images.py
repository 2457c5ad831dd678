"""Chunks of prompts whose images may not be cut: router and shard count the same tokens, forward by forward."""

import random

import pytest

from reference_server.images.chunks import Span, spans_of, uncut
from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.model_server import batch
from reference_server.router.scheduling import chunking
from reference_server.router.scheduling.queue import Entry
from reference_server.router.scheduling.request import ValidGenerateRequest
from tests.reference_server.model_server.forward.test_inputs import sequence

IMAGE = 99


def prompt_with_images(draw: random.Random) -> list[int]:
    ids: list[int] = []
    for _ in range(draw.randint(1, 4)):
        ids += [1] * draw.randint(1, 9) + [IMAGE] * draw.choice([0, 1, 2, 7, 20])
    return ids


def cuts(spans: tuple[Span, ...], place: int) -> bool:
    return any(first < place < last for first, last in spans)


@pytest.mark.parametrize("seed", range(20))
def test_router_and_shard_plan_the_same_chunks_and_cut_no_image(seed: int) -> None:
    draw = random.Random(seed)
    prompts = [prompt_with_images(draw) for _ in range(draw.randint(1, 4))]
    spans = [spans_of(ids, IMAGE) for ids in prompts]
    # A prefix hit may end within an image.
    starts = [draw.randint(0, len(ids) - 1) for ids in prompts]
    sequences = [
        sequence(id_, ids, len(ids), start, 0, [1])
        for id_, (ids, start) in enumerate(zip(prompts, starts, strict=True))
    ]
    entries = []
    for each, ids, own in zip(sequences, prompts, spans, strict=True):
        each.uncut_spans = own
        wire = Request(each.id, ("",), len(ids), ChooserParameters(), StoppingParameters(1))
        request = ValidGenerateRequest(wire, tuple(ids), 1, uncut_spans=own)
        entries.append(Entry(each.id, request, 0, remaining_prefill=len(ids) - each.cache_len))
    budget = draw.randint(4, 16)

    while any(each.is_prefill for each in sequences):
        batch.plan_chunks(sequences, budget)
        chunking.plan_chunks(entries, budget, Entry.uncut)
        assert chunking.current_tokens(entries) == sum(each.input_len for each in sequences)
        chunking.count_forward(entries)
        for each in sequences:
            if each.is_prefill:
                each.cache_len += each.input_len
            assert not cuts(each.uncut_spans, each.cache_len)

    assert all(entry.remaining_prefill == 0 for entry in entries)


def test_a_chunk_keeps_its_tokens_where_it_cuts_no_image() -> None:
    spans = ((4, 10), (12, 20))

    assert [uncut(2, count, spans) for count in (1, 2, 3, 8, 9, 10, 11, 18)] == [1, 2, 2, 8, 9, 10, 10, 18]
    # From within an image, whose first tokens are in the cache.
    assert [uncut(6, count, spans) for count in (1, 4, 5)] == [4, 4, 5]
