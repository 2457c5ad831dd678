"""TGI's native API: one `token` object per event, `details` in the last one, errors within status 200."""

from dataclasses import dataclass
from typing import Any

from loadgen.dialects.dialect import (
    BadPayloadError,
    NotThisApiError,
    ParsedAnswer,
    Sampling,
    decode_object,
    encode,
    merged,
    other_parts,
    unknown_field,
    whole_number,
)
from loadgen.http.framing import SSE, Framing
from loadgen.workloads.prompts.prompt import Prompt

# The fields of `parameters` that a row of prompts may set: TGI ignores any other.
PARAMETERS = frozenset(
    (
        *("adapter_id", "do_sample", "frequency_penalty", "grammar", "repetition_penalty", "return_full_text", "seed"),
        *("stop", "temperature", "top_k", "top_n_tokens", "top_p", "truncate", "typical_p", "watermark"),
    )
)


@dataclass(frozen=True, slots=True)
class Tgi:
    """`POST /generate_stream`, or `/generate` if answers are not streamed."""

    sampling: Sampling
    framing: Framing = SSE
    has_template: bool = False
    can_force_length: bool = True

    @property
    def path(self) -> str:
        return "/generate_stream" if self.sampling.streams else "/generate"

    def body(self, prompt: Prompt) -> bytes:
        parameters: dict[str, Any] = {"details": True, "do_sample": False}
        if self.sampling.temperature:
            parameters |= {"do_sample": True, "temperature": self.sampling.temperature, "seed": self.sampling.seed}
        if prompt.output_tokens is not None:
            parameters["max_new_tokens"] = prompt.output_tokens
            parameters |= self.sampling.exact_length(prompt.output_tokens)
        if prompt.adapter is not None:
            parameters["adapter_id"] = prompt.adapter
        parameters |= prompt.fields
        images = "".join(f"![]({image.data_url})" for image in prompt.images)
        return encode(merged({"inputs": images + prompt.text, "parameters": parameters}, self.sampling.extra))

    def refused(self, prompt: Prompt) -> str | None:
        return unknown_field(prompt, PARAMETERS) or other_parts(prompt)

    def read_whole(self, payload: bytes, answer: ParsedAnswer) -> None:
        response = decode_object(payload)
        if "error" in response:
            answer.error = str(response.get("error_type") or "error")
            return
        if not isinstance(response.get("generated_text"), str):
            raise NotThisApiError(f"a response has no `generated_text`: {payload[:80]!r}")
        answer.is_terminated = True
        answer.add_text(response["generated_text"])
        if response.get("details") is not None:
            _read_details(response["details"], answer)

    def read(self, payload: bytes, at_ns: int, answer: ParsedAnswer) -> None:
        event = decode_object(payload)
        token = event.get("token")
        if isinstance(token, dict):
            answer.counts_are_exact = True
            answer.add_event(at_ns)
        elif "error" in event:
            answer.error = str(event.get("error_type") or "error")
            return
        elif token is not None:
            raise BadPayloadError(f"`token` is {token!r}, not an object")
        else:
            raise NotThisApiError(f"an event has neither `token` nor `error`: {payload[:80]!r}")
        if event.get("generated_text") is not None:
            answer.is_terminated = True
            answer.add_text(event["generated_text"])
        details = event.get("details")
        if details is not None:
            _read_details(details, answer)


def _read_details(details: Any, answer: ParsedAnswer) -> None:
    if not isinstance(details, dict):
        raise BadPayloadError(f"`details` is {details!r}, not an object")
    answer.finish(details.get("finish_reason"))
    answer.usage_output_tokens = whole_number(details, "generated_tokens")
    answer.input_tokens = whole_number(details, "input_length")
    prefill = details.get("prefill")
    if answer.input_tokens is None and isinstance(prefill, list) and prefill:
        answer.input_tokens = len(prefill)
    answer.cached_input_tokens = whole_number(details, "cached_input_tokens")
