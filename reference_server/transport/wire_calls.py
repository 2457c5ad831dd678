"""The calls of a shard as messages: for each method, the shard's function, its arguments and its reply."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reference_server.transport.codec import WireCodec
from reference_server.transport.wire_schema import Message, Method

# gRPC clients refuse more than 8 KiB of metadata, which has an error's text twice, escaped.
MAX_ERROR_BYTES = 1500


@dataclass(frozen=True, slots=True)
class WireCall:
    """How a method's request becomes a call of `Shard`, and the result a reply.

    function: the name of the call in `Shard` and `BlockingShard`.
    """

    function: str
    arguments: Callable[[WireCodec, Message], tuple[Any, ...]]
    reply: Callable[[WireCodec, Method, Any], Message]


def _nothing(_codec: WireCodec, _request: Message) -> tuple[Any, ...]:
    return ()


def _empty(_codec: WireCodec, method: Method, _result: None) -> Message:
    return method.response()


WIRE_CALLS = {
    "Info": WireCall("info", _nothing, lambda codec, _, info: codec.encode_info(info)),
    "Health": WireCall("health", _nothing, _empty),
    "Warmup": WireCall(
        "warmup",
        lambda codec, request: (codec.decode_warmup_request(request),),
        lambda codec, _, reply: codec.encode_warmup_reply(reply),
    ),
    "Prefill": WireCall(
        "prefill",
        lambda codec, request: codec.decode_prefill_request(request),
        lambda codec, _, result: codec.encode_step(result, "PrefillResponse"),
    ),
    "Decode": WireCall(
        "decode",
        lambda codec, request: (codec.decode_decode_request(request),),
        lambda codec, _, result: codec.encode_step(result, "DecodeResponse"),
    ),
    "FilterBatch": WireCall(
        "filter_batch",
        lambda _, request: (request.batch_id, tuple(request.request_ids)),
        lambda codec, method, batch: method.response(batch=codec.encode_cached(batch)),
    ),
    "ClearCache": WireCall("clear_cache", lambda _, request: (request.id if request.HasField("id") else None,), _empty),
    "LoadAdapter": WireCall(
        "load_adapter",
        lambda codec, request: (codec.decode_adapter(request),),
        lambda _, method, nbytes: method.response(bytes=nbytes),
    ),
    "UnloadAdapter": WireCall("unload_adapter", lambda _, request: (request.adapter_id,), _empty),
}


def error_text(error: BaseException) -> str:
    """The first line of an error, shortened; the other lines of device errors are advice on debugging."""
    text = str(error) or type(error).__name__
    text = next(iter(text.splitlines()), text)
    return text.encode()[:MAX_ERROR_BYTES].decode(errors="ignore")
