"""The native API's requests, field for field."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from reference_server.router.schemas.scalars import F32, I32, U32, U64, ApiModel

#: Marks fields that TGI does not have; `engine.extensions` of `/info` lists them.
EXTENSION: dict[str, JsonValue] = {"x-extension": True}


class RequestGrammar(ApiModel):
    """A constraint on the output."""

    type: Literal["json", "json_object", "regex", "json_schema"]
    value: Any = Field(...)

    @model_validator(mode="after")
    def _fits(self) -> "RequestGrammar":
        if self.type == "regex" and not isinstance(self.value, str):
            raise ValueError("invalid type for `value`: a regex is a string")
        if self.type == "json_schema" and not (isinstance(self.value, dict) and "schema" in self.value):
            raise ValueError("missing field `value.schema`")
        return self


#: Any JSON object, as in OpenAI's `{"type": "json_object"}`. Compared by identity.
ANY_JSON_OBJECT = RequestGrammar(type="json_object", value=None)


class GenerateParameters(ApiModel):
    """Parameters of a native request."""

    best_of: U64 | None = Field(None, description="Generate this many samples and return the most likely one.")
    temperature: F32 | None = Field(None, description="Divides the logits before sampling; above 0.")
    repetition_penalty: F32 | None = Field(None, description="Above 0; 1.0 is no penalty.")
    frequency_penalty: F32 | None = Field(None, description="-2.0 to 2.0, times the count of a token so far.")
    top_k: I32 | None = Field(None, description="Sample from this many most likely tokens; at least 1.")
    top_p: F32 | None = Field(None, description="Sample from the smallest set with this probability; between 0 and 1.")
    typical_p: F32 | None = Field(None, description="Typical decoding mass; between 0 and 1.")
    do_sample: bool = Field(False, description="Sample instead of choosing the most likely token.")
    max_new_tokens: U32 | None = Field(None, description="Maximum of generated tokens; by default as many as fit.")
    return_full_text: bool | None = Field(None, description="Prepend the prompt to the generated text.")
    stop: list[str] = Field([], description="Texts that end the generation; the output includes the match.")
    truncate: U64 | None = Field(None, description="Keep only this many last tokens of the prompt.")
    watermark: bool = Field(False, description="Watermark the text.")
    details: bool = Field(False, description="Add `details` to the answer.")
    decoder_input_details: bool = Field(False, description="Add the prompt's log-probabilities; not on streams.")
    seed: U64 | None = Field(None, description="Seed of the sampling; random by default.")
    top_n_tokens: U32 | None = Field(None, description="Report this many most likely tokens at each position.")
    grammar: RequestGrammar | None = Field(None, description="Constrain the output.")
    adapter_id: str | None = Field(None, description="LoRA adapter; an unknown one selects the base model.")
    ignore_eos_token: bool = Field(
        False,
        description="Extension: do not stop at the end-of-sequence token.",
        json_schema_extra=EXTENSION,
    )
    min_new_tokens: U32 | None = Field(
        None,
        description="Extension: do not stop at end of sequence or at stop texts before this many tokens.",
        json_schema_extra=EXTENSION,
    )


# As in TGI, a body without `parameters` samples; one with `{}` does not.
ABSENT_PARAMETERS = GenerateParameters(do_sample=True)


class GenerateRequest(ApiModel):
    """Body of `/generate`, `/generate_stream` and `/tokenize`."""

    inputs: Annotated[str, Field(description="The prompt.")]
    parameters: GenerateParameters = ABSENT_PARAMETERS

    @field_validator("inputs", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError("expected one string; use /v1/completions with a list of prompts")
        return value


class CompatGenerateRequest(GenerateRequest):
    """Body of `/`: as `/generate`, and whether to stream."""

    stream: bool = False
