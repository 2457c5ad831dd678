import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from reference_server.errors import ValidationError
from reference_server.router.validation.request_rules import refuse_images
from reference_server.router.validation.validator import GenerateCall, Validator
from tests.support.models.word_tokenizer import WordTokenizer
from tests.support.servers.serving import LIMITS


@pytest.mark.parametrize(
    ("image", "text"),
    [
        ("http://h/i.png", "Could not fetch image: remote images are disabled"),
        ("file:///etc/passwd", "invalid image content: file:///etc/passwd"),
        ("data:image/png,x", "invalid image content: data:image/png,x"),
        ("data:a;b;base64,eA==", "invalid image content: data:a;b;base64,eA=="),
        ("data:image/png;base64,%%%", "base64 encoding is invalid: "),
        ("data:image/png;base64,eA==", "invalid image: the model server does not take images"),
    ],
)
def test_reliability_4_3_42_images_are_refused_with_tgis_texts(image: str, text: str):
    with pytest.raises(ValidationError) as caught:
        refuse_images(f"look: ![]({image})")

    assert str(caught.value).startswith(f"Input validation error: {text}")


@pytest.mark.parametrize(("model_type", "is_refused"), [("mllama", True), ("llama", False), (None, False)])
async def test_only_models_with_image_inputs_refuse_images(model_type: str | None, is_refused: bool):
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(WordTokenizer(), LIMITS, executor, model_type=model_type)
        try:
            await validator.validate(GenerateCall("![](http://h/i.png)"))
        except ValidationError:
            assert is_refused
        else:
            assert not is_refused


def test_hardening_R6_openings_of_images_without_an_end_are_read_once():
    start_s = time.thread_time()

    refuse_images("![](" * 60_000)

    assert time.thread_time() - start_s < 1.0


@pytest.mark.parametrize("model_type", ["idefics2", "llama"])
async def test_reliability_4_3_42_no_request_fetches_an_image(model_type: str):
    connections: list[object] = []
    server = await asyncio.start_server(lambda *streams: connections.append(streams), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/i.png"
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(WordTokenizer(), LIMITS, executor, model_type=model_type)
        with contextlib.suppress(ValidationError):
            await validator.validate(GenerateCall(f"look: ![]({url})"))
    await asyncio.sleep(0.05)
    server.close()

    assert connections == []
