import zlib

import pytest

from reference_server.errors import StartupError
from reference_server.messages import Image, ModelInfo, WarmupReply
from reference_server.router.validation.token_limits import (
    ConfiguredLimits,
    TokenLimits,
    check_limits,
    resolve_limits,
    tiny_picture,
    warmup_request,
)

PADDED = ModelInfo(requires_padding=True, dtype="torch.float32", device_type="cpu")
FLASH = ModelInfo(requires_padding=False, dtype="torch.float32", device_type="cpu")
CHUNKING = ModelInfo(requires_padding=False, dtype="torch.float32", device_type="cpu", support_chunking=True)


def test_grpc_5_1_the_prefill_budget_is_cut_into_prompts_of_the_input_limit():
    request = warmup_request(ConfiguredLimits(max_batch_prefill_tokens=10, max_input_tokens=4, max_total_tokens=7))

    assert [each.truncate for each in request.batch.requests] == [4, 4, 2]
    assert [each.stopping.max_new_tokens for each in request.batch.requests] == [3, 3, 5]
    assert [each.text for each in request.batch.requests] == ["_test " * 4, "_test " * 4, "_test " * 2]
    assert (request.batch.id, request.batch.max_tokens, request.batch.max_blocks) == (0, 4, 0)
    assert (request.max_prefill_tokens, request.max_input_tokens, request.max_total_tokens) == (10, 4, 7)


def test_grpc_5_1_without_limits_one_prompt_takes_the_whole_budget():
    request = warmup_request(ConfiguredLimits(max_batch_prefill_tokens=10))

    (only,) = request.batch.requests
    assert (only.truncate, only.stopping.max_new_tokens) == (10, 1)
    assert request.batch.max_tokens == 0
    assert (request.max_input_tokens, request.max_total_tokens) == (None, None)


def test_grpc_5_1_a_total_below_the_budget_still_requests_a_token():
    request = warmup_request(ConfiguredLimits(max_batch_prefill_tokens=10, max_total_tokens=6))

    assert request.batch.requests[0].stopping.max_new_tokens == 1


def test_grpc_5_1_the_batch_size_limits_the_prompts():
    configured = ConfiguredLimits(max_batch_prefill_tokens=10, max_input_tokens=2, max_batch_size=3)

    assert warmup_request(configured).batch.size == 3


def test_grpc_5_1_every_warper_is_on_and_only_the_first_prompt_has_a_picture():
    first, second = warmup_request(ConfiguredLimits(max_batch_prefill_tokens=8, max_input_tokens=4)).batch.requests

    chosen = first.parameters
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.typical_p) == (0.9, 10, 0.9, 0.9)
    assert (chosen.repetition_penalty, chosen.frequency_penalty, chosen.watermark) == (1.2, 0.1, True)
    assert (chosen.do_sample, chosen.seed) == (False, 0)
    assert first.stopping.ignore_eos_token
    assert first.prefill_logprobs
    assert first.top_n_tokens == 20
    assert (first.blocks, first.cache_len, first.chunk_len, first.adapter_id) == ((), 0, None, None)
    assert isinstance(first.chunks[1], Image)
    assert first.chunks[1].mimetype == "image/jpeg;base64"
    assert len(second.chunks) == 1


def test_the_picture_is_a_png_of_20_by_20_pixels():
    picture = tiny_picture()
    data = picture[picture.index(b"IDAT") + 4 :]

    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture[16:24] == b"\0\0\0\x14\0\0\0\x14"
    assert len(zlib.decompressobj().decompress(data)) == 20 * 21


def test_the_reported_total_is_in_force():
    limits = resolve_limits(ConfiguredLimits(4096), WarmupReply(8000, 2047, 2048), FLASH)

    assert limits == TokenLimits(2047, 2048, 4096, 8000)


def test_a_total_given_for_a_model_that_reports_one_is_ignored_with_two_warnings():
    limits = resolve_limits(ConfiguredLimits(4096, max_batch_total_tokens=9000), WarmupReply(8000, 2047, 2048), FLASH)

    assert limits.max_batch_total_tokens == 8000
    assert [("deprecated" in text, "inferred" in text) for text in limits.warnings] == [(True, False), (False, True)]


def test_a_total_limit_over_the_memory_is_refused():
    with pytest.raises(StartupError, match=r"not enough memory.*8001.*8000"):
        resolve_limits(ConfiguredLimits(4096), WarmupReply(8000, 4000, 8001), FLASH)


@pytest.mark.parametrize(
    ("configured", "total"),
    [
        (ConfiguredLimits(4096), 16_000),
        (ConfiguredLimits(20_000), 20_000),
        (ConfiguredLimits(4096, max_batch_total_tokens=5000), 5000),
    ],
)
def test_a_model_that_reports_nothing_gets_the_given_or_an_assumed_total(configured, total):
    limits = resolve_limits(configured, WarmupReply(None, 2047, 2048), PADDED)

    assert limits.max_batch_total_tokens == total
    assert len(limits.warnings) == 1


@pytest.mark.parametrize("name", ["max_input_tokens", "max_total_tokens"])
def test_returned_limits_that_differ_stop_the_start(name):
    with pytest.raises(StartupError, match=f"`{name}`"):
        resolve_limits(ConfiguredLimits(4096, **{name: 99}), WarmupReply(8000, 100, 200), FLASH)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (TokenLimits(100, 100, 4096, 8000), "`max_input_tokens` must be < `max_total_tokens`. Given: 100 and 100"),
        (TokenLimits(5000, 6000, 4096, 8000), "must be >= `max_input_tokens`"),
        (TokenLimits(100, 200, 4096, 4000), "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`"),
        (TokenLimits(100, 5000, 4096, 4096), "`max_total_tokens` must be <= `max_batch_total_tokens`"),
    ],
)
def test_contradicting_limits_stop_the_start(limits, text):
    with pytest.raises(StartupError, match=text):
        check_limits(limits, supports_chunking=False)


def test_a_long_input_is_allowed_if_prompts_are_chunked():
    limits = resolve_limits(ConfiguredLimits(1000), WarmupReply(8000, 4000, 5000), CHUNKING)

    assert limits.max_input_tokens == 4000
