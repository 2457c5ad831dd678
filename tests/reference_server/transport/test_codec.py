import doctest
import math
from dataclasses import replace

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings

from reference_server.errors import ShardError
from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    Generation,
    Image,
    ModelInfo,
    Request,
    StepResult,
    StoppingParameters,
    Timings,
    Tokens,
    WarmupRequest,
)
from reference_server.router.scheduling.blocks import FreeListAllocator
from reference_server.transport import codec as codec_module
from reference_server.transport.codec import WireCodec, expand_slots, flatten
from reference_server.transport.wire_schema import DESCRIPTOR_SET, load_schema
from tests.reference_server.transport import wire_values as values
from tests.reference_server.transport.wire_values import BLOCK_SIZE

V2, V3 = load_schema("v2"), load_schema("v3")
SCHEMAS = pytest.mark.parametrize("schema", [V2, V3], ids=["v2", "v3"])
# 20 cases each in CI; `--hypothesis-profile` with more examples is the long mode.
cases = settings(max_examples=20)


def sent(message):
    """The message as the other side reads it."""
    return type(message).FromString(message.SerializeToString())


def as_v2(batch):
    """The part of a batch that v2 can carry."""
    return replace(batch, requests=tuple(map(request_as_v2, batch.requests)), max_blocks=0)


def request_as_v2(request):
    return replace(
        request,
        chunks=(flatten(request.chunks),),
        blocks=(),
        num_slots=0,
        cache_len=0,
        chunk_len=None,
        adapter_id=None,
        add_special_tokens=True,
    )


@cases
@given(values.batches, values.cached_batches)
def test_prefill_request_round_trips(batch, cached):
    codec = WireCodec(V3)

    message = sent(codec.encode_prefill_request(batch, cached, BLOCK_SIZE))

    assert codec.decode_prefill_request(message) == (batch, cached)


@cases
@given(values.batches, values.cached_batches)
def test_v2_prefill_request_keeps_the_text_alone(batch, cached):
    codec = WireCodec(V2)

    message = sent(codec.encode_prefill_request(batch, cached, BLOCK_SIZE))

    assert codec.decode_prefill_request(message) == (as_v2(batch), None)


@cases
@given(values.step_results)
@pytest.mark.parametrize("kind", ["PrefillResponse", "DecodeResponse"])
@SCHEMAS
def test_step_result_round_trips(schema, kind, result):
    codec = WireCodec(schema)

    received = codec.decode_step(sent(codec.encode_step(result, kind)))

    if schema is V2:
        timings = result.timings if kind == "DecodeResponse" else replace(result.timings, concat_ns=None)
        batch = None if result.batch is None else replace(result.batch, current_tokens=0)
        result = replace(result, timings=timings, batch=batch)
    assert received == result


@cases
@given(values.cached_batches)
@SCHEMAS
def test_decode_request_round_trips(schema, batch):
    codec = WireCodec(schema)

    received = codec.decode_decode_request(sent(codec.encode_decode_request([batch, batch])))

    expected = batch if schema is V3 else replace(batch, current_tokens=0)
    assert received == [expected, expected]


@cases
@given(values.model_infos)
@SCHEMAS
def test_info_round_trips(schema, info):
    codec = WireCodec(schema)

    received = codec.decode_info(sent(codec.encode_info(info)))

    if schema is V2:
        info = ModelInfo(info.requires_padding, info.dtype, info.device_type, info.window_size, info.speculate)
    assert received == info


@cases
@given(values.warmup_requests)
@SCHEMAS
def test_warmup_request_round_trips(schema, request):
    codec = WireCodec(schema)

    received = codec.decode_warmup_request(sent(codec.encode_warmup_request(request, BLOCK_SIZE)))

    assert received == (request if schema is V3 else replace(request, batch=as_v2(request.batch)))


@cases
@given(values.warmup_requests, values.warmup_replies)
@SCHEMAS
def test_warmup_reply_round_trips(schema, request, reply):
    codec = WireCodec(schema)

    received = codec.decode_warmup_reply(sent(codec.encode_warmup_reply(reply)), request)

    if schema is V2:
        reply = replace(
            reply, max_input_tokens=request.max_input_tokens or 0, max_total_tokens=request.max_total_tokens or 0
        )
    assert received == reply


def test_renamed_field_of_warmup_has_one_number():
    request = WarmupRequest(Batch(0, ()), 4096, max_input_tokens=1000, max_total_tokens=2000)

    v2, v3 = (WireCodec(schema).encode_warmup_request(request, BLOCK_SIZE) for schema in (V2, V3))

    assert v2.max_input_length == v3.max_input_tokens == 1000
    assert v2.SerializeToString() == v3.SerializeToString()


def test_prompt_logprobs_keep_their_nan():
    codec = WireCodec(V3)
    prompt = Tokens((5, 6), (math.nan, -1.0), ("a", "b"))
    generation = Generation(1, Tokens((7,), (-0.5,), ("c",), (False,)), prefill_tokens=prompt)

    (received,) = codec.decode_step(
        sent(codec.encode_step(StepResult((generation,), None, Timings()), "PrefillResponse"))
    ).generations

    assert received.prefill_tokens is not None
    assert math.isnan(received.prefill_tokens.logprobs[0])
    assert received.prefill_tokens.logprobs[1:] == (-1.0,)
    assert received.prefill_tokens.is_special == ()


def test_slots_are_the_blocks_tokens_in_order():
    assert expand_slots((7,), 1, 256) == [1792]
    assert expand_slots((3, 9, 4), 5, 2) == [6, 7, 18, 19, 8]
    assert expand_slots((), 0, 16) == []
    assert expand_slots((2, 5), 2, 1) == [2, 5]


def test_blocks_of_a_sliding_window_are_reused_in_turn():
    allocation = FreeListAllocator(total_tokens=160, block_size=16, window_size=64).allocate(150, None)

    slots = expand_slots(allocation.blocks, allocation.num_slots, 16)

    assert slots == [*range(96, 160), *range(96, 160), *range(96, 118)]


def test_unset_extensions_are_not_sent():
    message = WireCodec(V3).encode_prefill_request(Batch(1, (plain_request(),)), None, BLOCK_SIZE).batch.requests[0]

    assert not message.parameters.HasField("presence_penalty")
    assert not message.stopping_parameters.HasField("min_new_tokens")
    assert not message.HasField("traceparent")


@SCHEMAS
def test_a_shard_of_tgi_reads_a_traced_request_without_the_extension(schema):
    traced = replace(plain_request(), traceparent=f"00-{1:032x}-{2:016x}-01")
    message = WireCodec(schema).encode_prefill_request(Batch(1, (traced,)), None, BLOCK_SIZE)
    files = FileDescriptorSet.FromString(DESCRIPTOR_SET.read_bytes())
    pool = DescriptorPool()
    for file in files.file:
        for kind in file.message_type:
            fields = [field for field in kind.field if field.number < 1000]
            oneofs = {field.oneof_index for field in fields if field.HasField("oneof_index")}
            del kind.field[:], kind.oneof_decl[max(oneofs, default=-1) + 1 :]
            kind.field.extend(fields)
        pool.Add(file)
    theirs = GetMessageClass(pool.FindMessageTypeByName(message.DESCRIPTOR.full_name))

    received = theirs.FromString(message.SerializeToString()).batch.requests[0]

    assert (received.id, received.inputs) == (traced.id, flatten(traced.chunks))
    assert not hasattr(received, "traceparent")


def test_flat_prompt_inlines_images():
    assert flatten(("see ", Image(b"\x01\x02", "image/png"), "?")) == "see ![](data:image/png;base64,AQI=)?"


def test_v3_request_without_chunks_is_read_from_inputs():
    message = V3.messages["PrefillRequest"]()
    message.batch.requests.add(id=1, inputs="plain")

    batch, cached = WireCodec(V3).decode_prefill_request(message)

    assert batch.requests[0].chunks == ("plain",)
    assert cached is None


@pytest.mark.parametrize("number", [3, -1])
def test_finish_reason_of_another_version_is_a_shard_error(number):
    message = V3.messages["DecodeResponse"]()
    message.generations.add().generated_text.finish_reason = number

    with pytest.raises(ShardError, match=f"unknown finish reason {number}"):
        WireCodec(V3).decode_step(message)


def test_size_is_the_number_of_requests():
    codec = WireCodec(V3)

    assert codec.encode_prefill_request(Batch(1, (plain_request(),)), None, BLOCK_SIZE).batch.size == 1
    assert codec.encode_cached(CachedBatch(1, (4, 5, 6), 96)).size == 3


def test_examples_in_the_docstrings():
    assert doctest.testmod(codec_module).failed == 0


def plain_request():
    return Request(1, ("hello",), 10, ChooserParameters(), StoppingParameters(5))
