"""Checks of a request that need no tokenizer: its parameters in TGI's order, and images in its prompt.

Each raises `ValidationError` with TGI's text for the first rule that is broken.
"""

from dataclasses import dataclass
from typing import TypeVar

from reference_server.errors import ValidationError
from reference_server.images.markdown import ImageSource, image_of_data_url, split_prompt
from reference_server.router.schemas.tgi import GenerateParameters

T = TypeVar("T")

MAX_STOP_CHARACTERS = 1024
MAX_ADAPTER_ID_CHARACTERS = 256

#: `model_type` of the models whose prompts hold images as Markdown `![](…)`. Those that are not served
#: (images/placeholder.py) may run in a foreign model server: then images are refused instead of read as text.
IMAGE_MODELS = frozenset({
    "idefics", "mllama", "idefics2", "idefics3", "gemma3", "llama4", "paligemma", "llava_next", "qwen2_vl",
    "qwen2_5_vl",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """Limits of one request.

    vocab_size: token ids that the model has; None if unknown.
    may_continue: a long generation may continue as a longer prompt; not so for encoder-decoder models, nor
    for those whose prompt tokens all attend to each other.
    """

    max_input_tokens: int
    max_total_tokens: int
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    may_continue: bool = True
    vocab_size: int | None = None


def check_best_of(best_of: int, limits: GenerationLimits) -> None:
    """For whole answers only, before a permit is taken."""
    if best_of > 1 and limits.max_best_of == 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if best_of > limits.max_best_of:
        raise ValidationError(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}")


def check_stream(parameters: GenerateParameters) -> None:
    """For streams only, before a permit is taken."""
    if parameters.best_of is not None and parameters.best_of != 1:
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if parameters.decoder_input_details:
        raise ValidationError("`decoder_input_details` == true is not supported when streaming tokens")


def check_parameters(parameters: GenerateParameters, limits: GenerationLimits, presence_penalty: float = 0.0) -> None:
    """All rules that do not depend on the prompt."""
    for is_broken, message in _rules(parameters, limits, presence_penalty):
        if is_broken:
            raise ValidationError(message)


def _rules(parameters: GenerateParameters, limits: GenerationLimits, presence_penalty: float) -> list[tuple[bool, str]]:
    """(broken?, message), in the order in which they are reported."""
    best_of = parameters.best_of or 1
    max_new, min_new, top_n = parameters.max_new_tokens, parameters.min_new_tokens, parameters.top_n_tokens
    samples = parameters.do_sample or any(
        value is not None
        for value in (parameters.temperature, parameters.top_k, parameters.top_p, parameters.typical_p)
    )
    return [
        (best_of > 1 and not samples, "you must use sampling when `best_of` is > 1"),
        (value_or(parameters.temperature, 1.0) <= 0.0, "`temperature` must be strictly positive"),
        (value_or(parameters.repetition_penalty, 1.0) <= 0.0, "`repetition_penalty` must be strictly positive"),
        (
            not -2.0 <= value_or(parameters.frequency_penalty, 0.0) <= 2.0,
            "`frequency_penalty` must be >= -2.0 and <= 2.0",
        ),
        (not -2.0 <= presence_penalty <= 2.0, "`presence_penalty` must be >= -2.0 and <= 2.0"),
        (not 0.0 < value_or(parameters.top_p, 0.5) < 1.0, "`top_p` must be > 0.0 and < 1.0"),
        (not 0.0 < value_or(parameters.typical_p, 0.5) < 1.0, "`typical_p` must be > 0.0 and < 1.0"),
        (value_or(parameters.top_k, 1) <= 0, "`top_k` must be strictly positive"),
        (max_new == 0, "`max_new_tokens` must be strictly positive"),
        (
            max_new is not None and min_new is not None and min_new > max_new,
            f"`min_new_tokens` must be <= `max_new_tokens`. Given: {min_new} and {max_new}",
        ),
        (
            len(parameters.stop) > limits.max_stop_sequences,
            f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(parameters.stop)}",
        ),
        (
            any(len(stop) > MAX_STOP_CHARACTERS for stop in parameters.stop),
            f"`stop` sequences must have at most {MAX_STOP_CHARACTERS} characters",
        ),
        (parameters.seed is not None and best_of > 1, "`seed` must not be set when `best_of` > 1"),
        (
            top_n is not None and top_n > limits.max_top_n_tokens,
            f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {top_n}",
        ),
        (
            len(parameters.adapter_id or "") > MAX_ADAPTER_ID_CHARACTERS,
            f"`adapter_id` must have at most {MAX_ADAPTER_ID_CHARACTERS} characters",
        ),
    ]


def refuse_images(prompt: str) -> None:
    """Refuse the first image of `prompt`, if there is one."""
    source = next((part for part in split_prompt(prompt) if isinstance(part, ImageSource)), None)
    if source is None:
        return
    if source.is_remote:
        raise ValidationError("Could not fetch image: remote images are disabled")
    image_of_data_url(source.url)
    raise ValidationError("invalid image: the model server does not take images")


def value_or(value: T | None, default: T) -> T:
    return default if value is None else value
