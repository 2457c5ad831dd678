"""A long random sequence of calls, as a router might make them: no request's output depends on the others.

Two sequences of 150 calls run here, six more in the long mode.
"""

import random
from collections.abc import Iterator

import pytest

from reference_server.messages import Batch, CachedBatch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import random_prompt, save_tiny_model, text_of

NUM_CALLS = 150
KINDS = (
    ChooserParameters(),
    ChooserParameters(temperature=0.7, top_k=15, seed=3),
    ChooserParameters(repetition_penalty=1.2, top_p=0.9, seed=4),
    ChooserParameters(frequency_penalty=0.4),
)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalShard]:
    directory = save_tiny_model(tmp_path_factory.mktemp("model"), "llama")
    shard = LocalShard.load(EngineOptions(str(directory), dtype="float32", cpu_memory_gib=0.05, compute_threads=1))
    yield shard
    shard.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
async def test_no_request_depends_on_other_calls(shard: LocalShard, seed: int) -> None:
    warmup = Request(0, (text_of([1] * 16),), 16, ChooserParameters(), StoppingParameters(1))
    await shard.warmup(WarmupRequest(Batch(0, (warmup,)), 16))
    driver = ShardDriver(shard, num_blocks=200)
    chance = random.Random(seed)
    kinds = [(random_prompt(length), length % 7 + 2, kind) for length in (1, 3, 9, 17, 33) for kind in KINDS]
    alone = [
        (await driver.run(driver.request(index, prompt, new_tokens, kind)))[0].ids
        for index, (prompt, new_tokens, kind) in enumerate(kinds)
    ]
    batches: list[CachedBatch] = []
    sent: dict[int, int] = {}
    left: set[int] = set()

    for call in range(NUM_CALLS):
        chance.shuffle(batches)
        if not batches or chance.random() < 0.4:
            requests = []
            for _ in range(chance.randint(1, 3)):
                kind = chance.randrange(len(kinds))
                prompt, new_tokens, parameters = kinds[kind]
                id_ = 1000 + 10 * call + len(requests)
                chunk_len = chance.randint(1, len(prompt)) if chance.random() < 0.5 else None
                requests.append(driver.request(id_, prompt, new_tokens, parameters, chunk_len=chunk_len))
                sent[id_] = kind
            cached = batches.pop() if batches and chance.random() < 0.5 else None
            result = await driver.prefill(*requests, cached=cached)
        else:
            taken = [batches.pop() for _ in range(chance.randint(1, len(batches)))]
            result = await driver.decode(*taken)
        batch = None if result.batch is None else await driver.drop_ended(result.batch)
        if batch is not None and batch.size > 1 and chance.random() < 0.15:
            # A client leaves.
            gone = chance.choice(batch.request_ids)
            left.add(gone)
            batch = await shard.filter_batch(batch.id, [id_ for id_ in batch.request_ids if id_ != gone])
            driver.release(gone)
        if batch is not None:
            batches.append(batch)
    while batches:
        result = await driver.decode(batches.pop())
        batch = None if result.batch is None else await driver.drop_ended(result.batch)
        if batch is not None:
            batches.append(batch)

    assert len(sent) > 60
    for id_, kind in sent.items():
        got, expected = driver.outcomes[id_].ids, alone[kind]
        assert got == (expected[: len(got)] if id_ in left else expected)
