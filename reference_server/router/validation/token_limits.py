"""Token limits: the warm-up request, the limits that follow from its reply, and the checks that start-up makes.

Pure; start/startup.py makes the calls.
"""

import struct
import zlib
from dataclasses import dataclass

from reference_server.configuration.config import RouterConfig
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
"""K/V block size by attention; under schema v2 a model server does not report it."""


def block_size_of(config: RouterConfig, info: ModelInfo) -> int:
    """Tokens of a block of K/V."""
    return V2_BLOCK_SIZES[config.shard_attention] if config.grpc_schema == "v2" else info.block_size


@dataclass(frozen=True, slots=True)
class ConfiguredLimits:
    """Limits from the configuration; the shard chooses those that are None."""

    max_batch_prefill_tokens: int
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    max_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Limits in force, and warnings for the operator about how they were resolved."""

    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    warnings: tuple[str, ...] = ()


def warmup_request(configured: ConfiguredLimits) -> WarmupRequest:
    """The largest prefill that serving will request. The shard allocates its blocks; the first prompt has an image."""
    requests: list[Request] = []
    prefilled = 0
    while prefilled < configured.max_batch_prefill_tokens and len(requests) != configured.max_batch_size:
        tokens = configured.max_batch_prefill_tokens - prefilled
        if configured.max_input_tokens is not None:
            tokens = min(tokens, configured.max_input_tokens)
        requests.append(_warmup_prompt(tokens, configured.max_total_tokens, with_picture=not requests))
        prefilled += tokens
    return WarmupRequest(
        batch=Batch(id=0, requests=tuple(requests), max_tokens=configured.max_input_tokens or 0),
        max_prefill_tokens=configured.max_batch_prefill_tokens,
        max_input_tokens=configured.max_input_tokens,
        max_total_tokens=configured.max_total_tokens,
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
        # At least one new token: without an input limit the prompt may use up the total limit.
        stopping=StoppingParameters(
            max_new_tokens=1 if max_total_tokens is None else max(1, max_total_tokens - tokens), ignore_eos_token=True
        ),
        prefill_logprobs=True,
        top_n_tokens=20,
    )


def tiny_picture() -> bytes:
    """A black PNG of 20 x 20 pixels, to warm up vision towers."""
    side = 20
    rows = zlib.compress((b"\0" + bytes(side)) * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _png_chunk(b"IHDR", header) + _png_chunk(b"IDAT", rows) + _png_chunk(b"IEND", b"")


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def resolve_limits(configured: ConfiguredLimits, reply: WarmupReply, info: ModelInfo) -> TokenLimits:
    """The limits in force after warm-up. Raises `StartupError` if they contradict each other."""
    for name, given, returned in (
        ("max_input_tokens", configured.max_input_tokens, reply.max_input_tokens),
        ("max_total_tokens", configured.max_total_tokens, reply.max_total_tokens),
    ):
        if given is not None and given != returned:
            raise StartupError(f"warmup: the model server returned `{name}` {returned}, but {given} was configured")
    total, warnings = _batch_total_tokens(configured, reply)
    limits = TokenLimits(
        reply.max_input_tokens, reply.max_total_tokens, configured.max_batch_prefill_tokens, total, warnings
    )
    check_limits(limits, supports_chunking=info.support_chunking)
    return limits


def _batch_total_tokens(configured: ConfiguredLimits, reply: WarmupReply) -> tuple[int, tuple[str, ...]]:
    supported = reply.max_supported_total_tokens
    if supported is None:
        warning = (
            "the model server does not report how many tokens fit: `max_batch_total_tokens` is not derived from memory"
        )
        if configured.max_batch_total_tokens is not None:
            return configured.max_batch_total_tokens, (warning,)
        assumed = max(MIN_PADDED_TOTAL_TOKENS, reply.max_total_tokens, configured.max_batch_prefill_tokens)
        return assumed, (warning,)
    if reply.max_total_tokens > supported:
        raise StartupError(
            f"not enough memory: `max_total_tokens` is {reply.max_total_tokens}, but the key-value cache holds "
            f"{supported} tokens; lower `max_total_tokens` or raise the memory fraction"
        )
    if configured.max_batch_total_tokens is None:
        return supported, ()
    return supported, (
        "`max_batch_total_tokens` is deprecated for this model",
        f"`max_batch_total_tokens` is inferred: {supported} in place of {configured.max_batch_total_tokens}",
    )


def check_limits(limits: TokenLimits, *, supports_chunking: bool) -> None:
    """Raise `StartupError` for the first limit that contradicts another."""
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
