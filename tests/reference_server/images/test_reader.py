"""Images of prompts, decoded in worker processes."""

import base64
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from reference_server.errors import ValidationError
from reference_server.images.placeholder import Prefixed, Tiled
from reference_server.images.prompt import PromptImage, chunks_of, digest_of
from reference_server.images.reader import MAX_IMAGES, ImageReader, worker_pool
from reference_server.messages import Image
from reference_server.workers import WorkerLimits
from tests.reference_server.images.test_decode import encoded, png_of_size

PLACEHOLDER = Tiled(((16, 32), (32, 16), (32, 32)), tile=16, patch=4)
TOKEN_ID = 50
PNG = encoded(20, 10)


def markdown(data: bytes) -> str:
    return f"![](data:image/png;base64,{base64.b64encode(data).decode()})"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader() -> AsyncIterator[ImageReader]:
    reader = ImageReader(PLACEHOLDER, TOKEN_ID, worker_pool(size=1), fetcher=None)
    await reader.start()
    yield reader
    await reader.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_prompt_is_read_into_texts_and_images(reader: ImageReader) -> None:
    parts = await reader.read(f"see {markdown(PNG)} and {markdown(PNG)}")

    image = Image(PNG, "image/png")
    count = PLACEHOLDER.num_tokens(10, 20)
    assert parts == ("see ", read := PromptImage(image, "<image>" * count), " and ", read)
    assert reader.text(parts) == f"see {'<image>' * count} and {'<image>' * count}"
    assert chunks_of(parts) == ("see ", image, " and ", image)


async def test_the_prefix_key_has_each_images_content_in_place_of_its_tokens(reader: ImageReader) -> None:
    other = encoded(20, 10, mode="L")
    parts = await reader.read(f"a{markdown(PNG)}b{markdown(other)}")
    count = PLACEHOLDER.num_tokens(10, 20)

    key = reader.prefix_ids(parts, [1, *[TOKEN_ID] * count, 2, *[TOKEN_ID] * count])

    first, second = -1 - digest_of(Image(PNG, "")), -1 - digest_of(Image(other, ""))
    assert key == (1, *[first] * count, 2, *[second] * count)
    assert first != second


async def test_only_a_prompt_of_paligemma_with_an_image_has_its_special_tokens(reader: ImageReader) -> None:
    of_paligemma = ImageReader(Prefixed(4), TOKEN_ID, worker_pool(size=1), fetcher=None)
    parts = await reader.read(f"a{markdown(PNG)}")

    assert of_paligemma.has_special_tokens(parts)
    assert not of_paligemma.has_special_tokens(("a",))
    assert not reader.has_special_tokens(parts)


async def test_too_many_images_are_refused_before_one_is_decoded(reader: ImageReader) -> None:
    with pytest.raises(ValidationError, match=f"`inputs` has 17 images, but at most {MAX_IMAGES} are read"):
        await reader.read("![](data:image/png;base64,AAEC)" * 17)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no image", "invalid image: its format is none of PNG"),
        (png_of_size(9000, 9000), "invalid image: it has 9000 x 9000 pixels"),
        (png_of_size(2000, 2000), "invalid image: it cannot be decoded"),
    ],
)
async def test_images_that_do_not_decode_are_refused(reader: ImageReader, data: bytes, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        await reader.read(markdown(data))


async def test_remote_images_are_disabled_without_a_fetcher(reader: ImageReader) -> None:
    with pytest.raises(ValidationError, match="Could not fetch image: remote images are disabled"):
        await reader.read("![](http://127.0.0.1/a.png)")


async def test_image_tokens_in_the_text_are_refused(reader: ImageReader) -> None:
    parts = await reader.read(f"<image>{markdown(PNG)}")
    own = PLACEHOLDER.num_tokens(10, 20)

    with pytest.raises(ValidationError, match=f"`inputs` has {own + 1} image tokens, but its images have {own}"):
        reader.check(parts, [TOKEN_ID] * (own + 1), num_truncated=0)


async def test_a_truncation_may_remove_text_but_no_part_of_an_image(reader: ImageReader) -> None:
    parts = await reader.read(f"a{markdown(PNG)}")
    ids = [1, *[TOKEN_ID] * PLACEHOLDER.num_tokens(10, 20)]

    reader.check(parts, ids, num_truncated=1)
    with pytest.raises(ValidationError, match="`truncate` cuts an image"):
        reader.check(parts, ids, num_truncated=2)


async def test_a_decoder_at_its_limit_of_memory_is_stopped_and_the_next_image_is_read() -> None:
    # Room for the interpreter and its libraries, and not for 75 MB of pixels.
    small = WorkerLimits(time_s=10.0, memory_bytes=150 << 20, max_waiting=4)
    reader = ImageReader(PLACEHOLDER, TOKEN_ID, worker_pool(1, small), fetcher=None)
    await reader.start()
    try:
        with pytest.raises(ValidationError, match="invalid image: its decoding was stopped"):
            await reader.read(markdown(encoded(7000, 7000, mode="L")))
        assert len(await reader.read(markdown(PNG))) == 1
    finally:
        await reader.close()
