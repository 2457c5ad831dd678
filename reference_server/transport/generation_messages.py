"""The generations of a step to protobuf and back, field by field, because every step encodes and decodes them."""

from collections.abc import Mapping
from typing import TypeVar

from reference_server.errors import ShardError
from reference_server.messages import (
    FinishReason,
    GeneratedText,
    Generation,
    Tokens,
)
from reference_server.transport.wire_schema import Message

T = TypeVar("T")

# In the order of the wire's numbers.
FINISH_REASONS = dict(enumerate((FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE)))
_FINISH_NUMBERS = {reason: number for number, reason in FINISH_REASONS.items()}


def encode_generation(generation: Generation, message: Message) -> None:
    message.request_id = generation.request_id
    _encode_tokens(generation.tokens, message.tokens)
    if generation.prefill_tokens is not None:
        message.prefill_tokens.SetInParent()
        _encode_tokens(generation.prefill_tokens, message.prefill_tokens)
    for tokens in generation.top_tokens:
        _encode_tokens(tokens, message.top_tokens.add())
    if generation.generated_text is not None:
        _encode_generated_text(generation.generated_text, message.generated_text)


def decode_generation(message: Message) -> Generation:
    top_tokens = message.top_tokens
    return Generation(
        message.request_id,
        _decode_tokens(message.tokens),
        _decode_tokens(message.prefill_tokens) if message.HasField("prefill_tokens") else None,
        _decode_generated_text(message.generated_text) if message.HasField("generated_text") else None,
        tuple([_decode_tokens(tokens) for tokens in top_tokens]) if top_tokens else (),
    )


def _encode_tokens(tokens: Tokens, message: Message) -> None:
    message.ids.extend(tokens.ids)
    message.logprobs.extend(tokens.logprobs)
    message.texts.extend(tokens.texts)
    message.is_special.extend(tokens.is_special)


def _decode_tokens(message: Message) -> Tokens:
    # A slice of a repeated field is one call; `tuple` of the field itself is one for each item.
    return Tokens(
        tuple(message.ids[:]), tuple(message.logprobs[:]), tuple(message.texts[:]), tuple(message.is_special[:])
    )


def _encode_generated_text(generated: GeneratedText, message: Message) -> None:
    message.text = generated.text
    message.generated_tokens = generated.generated_tokens
    message.finish_reason = _FINISH_NUMBERS[generated.finish_reason]
    if generated.seed is not None:
        message.seed = generated.seed
    message.SetInParent()


def _decode_generated_text(message: Message) -> GeneratedText:
    return GeneratedText(
        text=message.text,
        generated_tokens=message.generated_tokens,
        finish_reason=member(FINISH_REASONS, message.finish_reason, "finish reason"),
        seed=optional(message, "seed"),
    )


def optional(message: Message, field: str) -> Message:
    """The value of a field, or None if it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def member(members: Mapping[int, T], number: int, enum: str) -> T:
    """The enum member of a number. Raises ShardError for an unknown number."""
    if number not in members:
        raise ShardError(f"the peer sent the unknown {enum} {number}")
    return members[number]
