"""Random calls to padded, encoder-decoder and recurrent models: no request depends on the rest of its batch.

Sixty calls per model; six hundred in the slow tests.
"""

import random
from pathlib import Path

import pytest

from reference_server.messages import CachedBatch, ChooserParameters, Request
from reference_server.model_server.calls.local_shard import LocalShard
from tests.support.models.lower_tiers import ENCODER_DECODER, PADDED, RECURRENT, save_model, unplaced
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import random_prompt
from tests.support.models.tiny_shards import tiny_options, warm_up

MODELS = {
    "gpt-neo": PADDED["gpt-neo"],
    "t5": ENCODER_DECODER["t5"],
    "bart": ENCODER_DECODER["bart"],
    "led": ENCODER_DECODER["led, by no record"],
    "mamba": RECURRENT["mamba"],
}
SAMPLED = ChooserParameters(temperature=0.7, top_k=15, seed=3)
KINDS = [
    (random_prompt(length), length % 7 + 2, parameters)
    for length in (1, 3, 9, 17)
    for parameters in (ChooserParameters(), SAMPLED, ChooserParameters(repetition_penalty=1.2))
]


@pytest.mark.parametrize("num_calls", [40, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("bart", "led") else ()) for name in MODELS]
)
async def test_no_request_depends_on_other_calls(tmp_path: Path, name: str, num_calls: int) -> None:
    save_model(tmp_path, MODELS[name])
    shard = LocalShard.load(tiny_options(tmp_path))
    await warm_up(shard)
    driver = ShardDriver(shard)
    alone = [
        (await driver.run(unplaced(driver, number, prompt, new_tokens, parameters=parameters)))[0].ids
        for number, (prompt, new_tokens, parameters) in enumerate(KINDS)
    ]

    sent, left = await random_calls(driver, random.Random(name), num_calls)
    shard.close()

    assert len(sent) > num_calls / 3
    for id_, kind in sent.items():
        got, expected = driver.outcomes[id_].ids, alone[kind]
        assert got == (expected[: len(got)] if id_ in left else expected)


async def random_calls(driver: ShardDriver, chance: random.Random, num_calls: int) -> tuple[dict[int, int], set[int]]:
    """Make random calls; returns the kind of each request, and the ids of cancelled requests."""
    sent: dict[int, int] = {}
    left: set[int] = set()
    batches: list[CachedBatch] = []
    for call in range(num_calls):
        chance.shuffle(batches)
        if not batches or (len(batches) < 4 and chance.random() < 0.35):
            ids = [1000 + 10 * call + place for place in range(chance.randint(1, 3))]
            sent |= {id_: chance.randrange(len(KINDS)) for id_ in ids}
            result = await driver.prefill(*(request_of(driver, id_, sent[id_]) for id_ in ids))
        else:
            result = await driver.decode(*(batches.pop() for _ in range(chance.randint(1, len(batches)))))
        batch = None if result.batch is None else await driver.drop_ended(result.batch)
        if batch is not None and batch.size > 1 and chance.random() < 0.2:
            gone = chance.choice(batch.request_ids)
            left.add(gone)
            order = chance.sample([id_ for id_ in batch.request_ids if id_ != gone], batch.size - 1)
            batch = await driver.shard.filter_batch(batch.id, order)
        if batch is not None and chance.random() < 0.03:
            await driver.shard.clear_cache(batch.id)
            left |= set(batch.request_ids)
            batch = None
        if batch is not None:
            batches.append(batch)
    for batch in batches:
        await driver.finish(await driver.decode(batch))
    return sent, left


def request_of(driver: ShardDriver, id_: int, kind: int) -> Request:
    prompt, new_tokens, parameters = KINDS[kind]
    return unplaced(driver, id_, prompt, new_tokens, parameters=parameters)
