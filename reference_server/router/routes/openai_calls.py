"""OpenAI requests as native generations: checks their features, then makes one `GenerateCall` per choice."""

import json

import numpy

from reference_server.errors import ValidationError
from reference_server.router.chat.tools import ToolOffer
from reference_server.router.schemas.openai import ChatRequest, CompletionRequest, SamplingFields
from reference_server.router.schemas.tgi import GenerateParameters
from reference_server.router.telemetry.request_context import RequestContext
from reference_server.router.validation.validator import GenerateCall


def completion_calls(request: CompletionRequest, choices: int, context: RequestContext) -> list[GenerateCall]:
    """One generation per prompt and choice, in order of their index."""
    return [
        GenerateCall(
            prompt,
            # TGI also requests the prompt's logprobs for single answers. They are not in the answer, and a request with
            # them cannot use the prefix cache.
            _parameters(request, choice).model_copy(update={"repetition_penalty": request.repetition_penalty}),
            presence_penalty=request.presence_penalty or 0.0,
            context=context,
        )
        for prompt in request.prompt
        for choice in range(choices)
    ]


def chat_calls(
    request: ChatRequest, prompt: str, offer: ToolOffer | None, choices: int, context: RequestContext
) -> list[GenerateCall]:
    """One generation per choice of a rendered conversation. Raises `ValidationError`."""
    grammar = None if request.response_format is None else request.response_format.grammar()
    if offer is not None:
        grammar = offer.grammar()
    update = {"top_n_tokens": request.top_logprobs, "grammar": grammar}
    return [
        GenerateCall(
            prompt,
            _parameters(request, choice).model_copy(update=update),
            add_special_tokens=False,
            presence_penalty=request.presence_penalty or 0.0,
            context=context,
        )
        for choice in range(choices)
    ]


def _parameters(request: SamplingFields, choice: int) -> GenerateParameters:
    is_greedy = request.temperature == 0.0
    max_tokens = request.max_completion_tokens
    return GenerateParameters.model_construct(
        temperature=None if is_greedy else request.temperature,
        do_sample=not is_greedy,
        frequency_penalty=request.frequency_penalty,
        # OpenAI's 1 means no limit; the native API refuses it, as TGI does. Other values would turn on sampling.
        top_p=None if is_greedy or request.top_p == 1.0 else request.top_p,
        max_new_tokens=request.max_tokens if max_tokens is None else max_tokens,
        stop=request.stop or [],
        details=True,
        seed=None if request.seed is None else (request.seed + choice) % 2**64,
        adapter_id=None if request.model in (None, "tgi") else request.model,
        ignore_eos_token=bool(request.ignore_eos_token or request.ignore_eos),
        min_new_tokens=request.min_new_tokens,
    )


def check_common(request: SamplingFields, max_best_of: int) -> int:
    """The rules of both routes; returns the number of choices. Raises `ValidationError`."""
    _check_same(request, "max_tokens", "max_completion_tokens")
    _check_same(request, "ignore_eos_token", "ignore_eos")
    if request.logit_bias:
        raise ValidationError("`logit_bias` is not supported")
    choices = 1 if request.n is None else request.n
    if not 0 < choices <= max(1, max_best_of):
        raise ValidationError(f"`n` must be > 0 and <= {max_best_of}. Given: {choices}")
    if request.top_p is not None and not 0.0 < request.top_p <= 1.0:
        raise ValidationError(f"`top_p` must be > 0.0 and <= 1.0. Given: {numpy.float32(request.top_p)!s}")
    if request.store:
        raise ValidationError("`store` is not supported: answers are not stored. Given: true")
    if request.service_tier not in (None, "auto", "default"):
        raise ValidationError(f"`service_tier` must be `auto` or `default`. Given: {request.service_tier}")
    return choices


def check_completion(request: CompletionRequest, choices: int) -> None:
    """OpenAI's fields of completions that are not supported. Raises `ValidationError`."""
    if request.echo:
        raise ValidationError("`echo` is not supported: the answer does not repeat the prompt. Given: true")
    if request.logprobs:
        given = json.dumps(request.logprobs)
        raise ValidationError(f"`logprobs` must be 0 here; /v1/chat/completions supports them. Given: {given}")
    if request.best_of is not None and request.best_of > choices:
        raise ValidationError(
            "`best_of` must be <= `n`, since every choice is returned; /generate supports it. "
            f"Given: {request.best_of} and {choices}"
        )


def _check_same(request: SamplingFields, name: str, other: str) -> None:
    """Check two names of one field for the same value."""
    values = (getattr(request, name), getattr(request, other))
    if None not in values and values[0] != values[1]:
        given = " and ".join(map(json.dumps, values))
        raise ValidationError(f"`{name}` and `{other}` must be equal when both are given. Given: {given}")
