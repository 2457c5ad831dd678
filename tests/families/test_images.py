"""Models with images on tiny random weights in float32: the engine generates the ids of Transformers' generate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from reference_server.errors import ShardError
from reference_server.images.placeholder import Placeholder
from reference_server.messages import (
    Batch,
    ChooserParameters,
    Image,
    InputChunk,
    Request,
    StoppingParameters,
    WarmupRequest,
)
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.drafting import Drafter
from reference_server.router.validation.token_limits import tiny_picture
from tests.support.models.known_drafts import KnownDrafts
from tests.support.models.shard_driver import ShardDriver, outside_loop
from tests.support.models.tiny_models import one_group_each
from tests.support.models.tiny_shards import tiny_options
from tests.support.models.tiny_vision import VISION_MODELS, SavedVisionModel, picture, save_vision_model

NEW_TOKENS = 8
Parts = Sequence[str | bytes]
# Wide, high and small images; two in a prompt; text alone; an image at the end.
PROMPTS: tuple[Parts, ...] = (
    ("w3 w4", picture(20, 45), "w9 w1"),
    ("w7 w8 w9 w10 w11",),
    (picture(60, 18, seed=1), "w5 w6 w7"),
    ("w2", picture(9, 9, seed=2), "w4", picture(20, 45), "w1"),
    ("w12", picture(33, 30, seed=3)),
)
CHUNK_BUDGET = 32
UNFUSED = "-modules"
# Variants of a family that the short suite has.
VARIANTS = ("smolvlm", "qwen2.5-vl", "paligemma2", f"llava-next{UNFUSED}")


@dataclass(frozen=True)
class Loaded:
    """The shard of a model, and Transformers' results for the prompts."""

    saved: SavedVisionModel
    shard: LocalShard
    expected: list[list[int]]


@pytest.fixture(scope="module", params=one_group_each([*VISION_MODELS, f"llava-next{UNFUSED}"], slow=VARIANTS))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    name = request.param
    saved = save_vision_model(tmp_path_factory.mktemp(name), name.removesuffix(UNFUSED))
    shard = LocalShard.load(tiny_options(saved.directory, fuse=not name.endswith(UNFUSED), prefix_caching=True))
    guesses = outside_loop(generated(Loaded(saved, shard, [])))
    expected = [saved.generate(parts, NEW_TOKENS, guess) for parts, guess in zip(PROMPTS, guesses, strict=True)]
    yield Loaded(saved, shard, expected)
    shard.close()


async def warmed(loaded: Loaded) -> ShardDriver:
    chunks = ("w1 " * 40, Image(tiny_picture(), "image/jpeg;base64"))
    request = Request(0, chunks, 40, ChooserParameters(), StoppingParameters(1))
    await loaded.shard.warmup(WarmupRequest(Batch(0, (request,)), CHUNK_BUDGET))
    return ShardDriver(loaded.shard)


def chunks_of(parts: Parts) -> tuple[InputChunk, ...]:
    return tuple(part if isinstance(part, str) else Image(part, "image/png") for part in parts)


def request_of(driver: ShardDriver, loaded: Loaded, id_: int, parts: Parts, **fields: object) -> Request:
    return driver.request(id_, loaded.saved.prompt_ids(parts), NEW_TOKENS, chunks=chunks_of(parts), **fields)


async def generated(loaded: Loaded) -> list[list[int]]:
    driver = await warmed(loaded)
    outcomes = await driver.run(*(request_of(driver, loaded, id_, parts) for id_, parts in enumerate(PROMPTS)))
    return [outcome.ids for outcome in outcomes]


async def is_refused_in_chunks(loaded: Loaded) -> bool:
    """Whether the model needs whole prompts. Checks that such a model refuses a chunk."""
    if loaded.shard.engine.info.support_chunking:
        return False
    driver = await warmed(loaded)
    with pytest.raises(ShardError, match="prompts are not computed in chunks here"):
        await driver.prefill(request_of(driver, loaded, 0, PROMPTS[0], chunk_len=5))
    return True


def test_each_prompt_with_another_image_has_other_tokens(loaded: Loaded) -> None:
    other = loaded.saved.generate(("w3 w4", picture(20, 45, seed=9), "w9 w1"), NEW_TOKENS)

    assert other != loaded.expected[0]


async def test_a_batch_of_texts_and_images_equals_generate_alone(loaded: Loaded) -> None:
    assert await generated(loaded) == loaded.expected


async def test_prompts_with_images_in_chunks_equal_generate_alone(loaded: Loaded) -> None:
    if await is_refused_in_chunks(loaded):
        return
    driver = await warmed(loaded)
    requests = [request_of(driver, loaded, id_, parts) for id_, parts in enumerate(PROMPTS)]

    result = None
    for request in requests:
        # The first chunk ends within an image; the budget cuts the rest.
        first_chunk = replace(request, chunk_len=5)
        result = await driver.prefill(first_chunk, cached=None if result is None else result.batch)
    assert result is not None
    await driver.finish(result)

    assert [driver.outcomes[request.id].ids for request in requests] == loaded.expected


async def test_an_image_whose_last_token_is_a_chunk_of_its_own_equals_generate_alone(loaded: Loaded) -> None:
    if await is_refused_in_chunks(loaded):
        return
    driver = await warmed(loaded)
    parts = PROMPTS[-1]
    length = len(loaded.saved.prompt_ids(parts))
    request = request_of(driver, loaded, 0, parts, chunk_len=length - 1)

    result = await driver.prefill(request)
    await driver.finish(result)

    assert driver.outcomes[0].ids == loaded.expected[-1]


async def test_drafts_change_no_token(loaded: Loaded) -> None:
    driver = await warmed(loaded)
    loaded.shard.engine.stepper.drafter = Drafter(KnownDrafts(dict(enumerate(loaded.expected))), speculate=3)

    outcomes = await driver.run(*(request_of(driver, loaded, id_, parts) for id_, parts in enumerate(PROMPTS)))

    loaded.shard.engine.stepper.drafter = None
    assert [outcome.ids for outcome in outcomes] == loaded.expected
    assert sum(outcome.num_generations for outcome in outcomes) < len(PROMPTS) * NEW_TOKENS


async def test_a_second_request_with_the_same_image_reads_the_cached_blocks(loaded: Loaded) -> None:
    driver = await warmed(loaded)
    parts = PROMPTS[0]
    cached = driver.block_size
    first = request_of(driver, loaded, 0, parts)
    second = request_of(driver, loaded, 1, parts, cache_len=cached)
    second = replace(second, blocks=(*first.blocks[:1], *second.blocks[1:]))
    await driver.run(first)

    (outcome,) = await driver.run(second)

    assert cached < len(loaded.saved.prompt_ids(parts))
    assert outcome.ids == loaded.expected[0]


def test_a_model_whose_prompts_are_whole_has_neither_chunks_nor_prefixes(loaded: Loaded) -> None:
    info, model_type = loaded.shard.engine.info, loaded.saved.model.config.model_type

    assert info.use_prefix_caching == (model_type != "paligemma")
    assert info.support_chunking == (model_type != "paligemma")


async def test_a_flat_prompt_of_schema_v2_has_the_same_images(loaded: Loaded) -> None:
    from reference_server.transport.codec import flatten

    driver = await warmed(loaded)
    request = replace(request_of(driver, loaded, 0, PROMPTS[3]), chunks=(flatten(chunks_of(PROMPTS[3])),))

    (outcome,) = await driver.run(request)

    assert outcome.ids == loaded.expected[3]


async def test_a_prompt_that_names_image_tokens_itself_is_refused(loaded: Loaded) -> None:
    driver = await warmed(loaded)
    parts = (f"{loaded.saved.placeholder.token} w3", picture(9, 9))

    with pytest.raises(ShardError, match="image tokens, but its images have"):
        await driver.run(request_of(driver, loaded, 0, parts))


class OneTokenTooMany:
    """A placeholder that does not fit the model: it has one token more than an image has embeddings."""

    def __init__(self, placeholder: Placeholder) -> None:
        self.token = placeholder.token
        self.join = placeholder.join
        self._text = placeholder.text

    def text(self, height: int, width: int) -> str:
        return self._text(height, width).replace(self.token, self.token * 2, 1)


async def test_images_that_cannot_be_embedded_fail_their_own_request(tmp_path: Path) -> None:
    saved = save_vision_model(tmp_path, "llava-next")
    shard = LocalShard.load(tiny_options(saved.directory))
    loaded = Loaded(saved, shard, [])
    driver = await warmed(loaded)
    tower = shard.engine.loaded.vision
    assert tower is not None
    tower.placeholder = OneTokenTooMany(tower.placeholder)
    requests = [request_of(driver, loaded, id_, parts) for id_, parts in enumerate(PROMPTS[:2])]

    await driver.run(*requests)
    shard.close()

    assert driver.outcomes[0].ids == []
    assert driver.outcomes[1].ids == saved.generate(PROMPTS[1], NEW_TOKENS)


async def test_an_image_that_does_not_decode_is_refused(loaded: Loaded) -> None:
    driver = await warmed(loaded)
    request = driver.request(0, [1] * 20, chunks=("w1", Image(b"no image", "image/png")))

    with pytest.raises(ShardError, match="request 0 has an invalid image: its format is none of PNG, JPEG"):
        await driver.run(request)
