"""What the OpenAI routes judge before a prompt is rendered or a stream starts (http-api.md section 3.5)."""

import json

import numpy

from reference_server.errors import ValidationError
from reference_server.router.schemas.openai import CompletionRequest, SamplingFields


def check_common(request: SamplingFields, max_best_of: int) -> int:
    """The rows of both routes; how many choices are wanted. Raises `ValidationError`."""
    _check_names_of_one(request, "max_tokens", "max_completion_tokens")
    _check_names_of_one(request, "ignore_eos_token", "ignore_eos")
    if request.logit_bias:
        raise ValidationError("`logit_bias` is not supported")
    choices = 1 if request.n is None else request.n
    if not 0 < choices <= max(1, max_best_of):
        raise ValidationError(f"`n` must be > 0 and <= {max_best_of}. Given: {choices}")
    if request.top_p is not None and not 0.0 < request.top_p <= 1.0:
        raise ValidationError(f"`top_p` must be > 0.0 and <= 1.0. Given: {numpy.float32(request.top_p)!s}")
    if request.store:
        raise ValidationError("`store` is not supported: no answer is kept. Given: true")
    if request.service_tier not in (None, "auto", "default"):
        raise ValidationError(f"`service_tier` must be `auto` or `default`. Given: {request.service_tier}")
    return choices


def check_completion(request: CompletionRequest, choices: int) -> None:
    """What OpenAI's completions have and these do not. Raises `ValidationError`."""
    if request.echo:
        raise ValidationError("`echo` is not supported: the prompt is not told again. Given: true")
    if request.logprobs:
        given = json.dumps(request.logprobs)
        raise ValidationError(f"`logprobs` must be 0 here; /v1/chat/completions has them. Given: {given}")
    if request.best_of is not None and request.best_of > choices:
        raise ValidationError(
            "`best_of` must be <= `n`, since every choice is told; /generate has it. "
            f"Given: {request.best_of} and {choices}"
        )


def _check_names_of_one(request: SamplingFields, name: str, other: str) -> None:
    """Two fields that are names of the same thing."""
    values = (getattr(request, name), getattr(request, other))
    if None not in values and values[0] != values[1]:
        given = " and ".join(map(json.dumps, values))
        raise ValidationError(f"`{name}` and `{other}` must be equal when both are given. Given: {given}")
