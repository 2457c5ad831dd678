"""Before serving: the warm-up request, the limits that its reply puts in force, and what makes start-up fail.

grpc.md section 5.1 and scheduling.md section 7. Pure; the router's command makes the calls.
"""

import struct
import zlib
from dataclasses import dataclass

from reference_server.errors import StartupError
from reference_server.messages import (
    Batch,
    ChooserParameters,
    Image,
    InputChunk,
    ModelInfo,
    Request,
    StoppingParameters,
    WarmupReply,
    WarmupRequest,
)

MIN_PADDED_TOTAL_TOKENS = 16_000
"""Least `max_batch_total_tokens` assumed for a model that does not report what fits."""


V2_BLOCK_SIZES = {
    "auto": 16, "paged": 16, "torch": 16, "triton": 16, "flashinfer": 1, "flashdecoding-ipex": 64,
    "flashdecoding": 256, "varlen": 256, "flash": 256,
}  # fmt: skip
"""The page of each kind of attention, which a model server does not tell under schema v2."""


@dataclass(frozen=True, slots=True)
class AskedLimits:
    """What the operator set; None is left to the shard."""

    max_batch_prefill_tokens: int
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    max_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What is in force, and what the operator should be told about how it came to be."""

    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    warnings: tuple[str, ...] = ()


def warmup_request(asked: AskedLimits) -> WarmupRequest:
    """The largest prefill that serving will ask for. The shard places it; the first prompt brings a picture along."""
    requests: list[Request] = []
    prefilled = 0
    while prefilled < asked.max_batch_prefill_tokens and len(requests) != asked.max_batch_size:
        tokens = asked.max_batch_prefill_tokens - prefilled
        if asked.max_input_tokens is not None:
            tokens = min(tokens, asked.max_input_tokens)
        requests.append(_warmup_prompt(tokens, asked.max_total_tokens, with_picture=not requests))
        prefilled += tokens
    return WarmupRequest(
        batch=Batch(id=0, requests=tuple(requests), max_tokens=asked.max_input_tokens or 0),
        max_prefill_tokens=asked.max_batch_prefill_tokens,
        max_input_tokens=asked.max_input_tokens,
        max_total_tokens=asked.max_total_tokens,
    )


def _warmup_prompt(tokens: int, max_total_tokens: int | None, *, with_picture: bool) -> Request:
    chunks: tuple[InputChunk, ...] = ("_test " * tokens,)
    if with_picture:
        chunks += (Image(tiny_picture(), "image/jpeg;base64"),)
    return Request(
        id=0,
        chunks=chunks,
        truncate=tokens,
        parameters=ChooserParameters(
            temperature=0.9,
            top_k=10,
            top_p=0.9,
            typical_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            watermark=True,
        ),
        # At least one new token: the prompt may take all of the total limit when no input limit was given.
        stopping=StoppingParameters(
            max_new_tokens=1 if max_total_tokens is None else max(1, max_total_tokens - tokens), ignore_eos_token=True
        ),
        prefill_logprobs=True,
        top_n_tokens=20,
    )


def tiny_picture() -> bytes:
    """A black PNG of 20 x 20 pixels, for vision towers to be exercised with."""
    side = 20
    rows = zlib.compress((b"\0" + bytes(side)) * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _png_chunk(b"IHDR", header) + _png_chunk(b"IDAT", rows) + _png_chunk(b"IEND", b"")


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def resolve_limits(asked: AskedLimits, reply: WarmupReply, info: ModelInfo) -> Limits:
    """The limits in force after warm-up. Raises `StartupError` where they cannot work together."""
    for name, given, told in (
        ("max_input_tokens", asked.max_input_tokens, reply.max_input_tokens),
        ("max_total_tokens", asked.max_total_tokens, reply.max_total_tokens),
    ):
        if given is not None and given != told:
            raise StartupError(f"warmup: the model server answers `{name}` {told}, but {given} was asked for")
    total, warnings = _batch_total_tokens(asked, reply)
    limits = Limits(reply.max_input_tokens, reply.max_total_tokens, asked.max_batch_prefill_tokens, total, warnings)
    check_limits(limits, supports_chunking=info.support_chunking)
    return limits


def _batch_total_tokens(asked: AskedLimits, reply: WarmupReply) -> tuple[int, tuple[str, ...]]:
    supported = reply.max_supported_total_tokens
    if supported is None:
        warning = (
            "the model server does not report how many tokens fit: `max_batch_total_tokens` is not sized by itself"
        )
        if asked.max_batch_total_tokens is not None:
            return asked.max_batch_total_tokens, (warning,)
        assumed = max(MIN_PADDED_TOTAL_TOKENS, reply.max_total_tokens, asked.max_batch_prefill_tokens)
        return assumed, (warning,)
    if reply.max_total_tokens > supported:
        raise StartupError(
            f"not enough memory: `max_total_tokens` is {reply.max_total_tokens}, but the key-value cache holds "
            f"{supported} tokens; lower `max_total_tokens` or raise the memory fraction"
        )
    if asked.max_batch_total_tokens is None:
        return supported, ()
    return supported, (
        "`max_batch_total_tokens` is deprecated for this model",
        f"`max_batch_total_tokens` is inferred: {supported} in place of {asked.max_batch_total_tokens}",
    )


def check_limits(limits: Limits, *, supports_chunking: bool) -> None:
    """Raise `StartupError` for the first rule of scheduling.md section 7 that does not hold."""
    if limits.max_input_tokens >= limits.max_total_tokens:
        raise StartupError(
            f"`max_input_tokens` must be < `max_total_tokens`. "
            f"Given: {limits.max_input_tokens} and {limits.max_total_tokens}"
        )
    if not supports_chunking and limits.max_input_tokens > limits.max_batch_prefill_tokens:
        raise StartupError(
            f"`max_batch_prefill_tokens` must be >= `max_input_tokens` when prompts are not prefilled in chunks. "
            f"Given: {limits.max_batch_prefill_tokens} and {limits.max_input_tokens}"
        )
    if limits.max_batch_prefill_tokens > limits.max_batch_total_tokens:
        raise StartupError(
            f"`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {limits.max_batch_prefill_tokens} and {limits.max_batch_total_tokens}"
        )
    if limits.max_total_tokens > limits.max_batch_total_tokens:
        raise StartupError(
            f"`max_total_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {limits.max_total_tokens} and {limits.max_batch_total_tokens}"
        )
