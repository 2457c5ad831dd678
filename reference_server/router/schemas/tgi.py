"""The native API's requests, field for field (http-api.md section 2.1 and 2.2)."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from reference_server.router.schemas.scalars import F32, I32, U32, U64, ApiModel

#: What goes beyond TGI on these routes; `engine.extensions` of `/info` names them.
EXTENSION: dict[str, JsonValue] = {"x-extension": True}


class GrammarType(ApiModel):
    """A constraint on the output."""

    type: Literal["json", "json_object", "regex", "json_schema"]
    value: Any = Field(...)

    @model_validator(mode="after")
    def _fits(self) -> "GrammarType":
        if self.type == "regex" and not isinstance(self.value, str):
            raise ValueError("invalid type for `value`: a regex is a string")
        if self.type == "json_schema" and not (isinstance(self.value, dict) and "schema" in self.value):
            raise ValueError("missing field `value.schema`")
        return self


#: Any JSON object at all: what OpenAI's `{"type": "json_object"}` asks for. Told apart by identity.
ANY_JSON_OBJECT = GrammarType(type="json_object", value=None)


class GenerateParameters(ApiModel):
    """Everything a native request can ask for beyond its prompt."""

    best_of: U64 | None = Field(None, description="Generate this many samples and return the most likely one.")
    temperature: F32 | None = Field(None, description="Divides the logits before sampling; above 0.")
    repetition_penalty: F32 | None = Field(None, description="Above 0; 1.0 is no penalty.")
    frequency_penalty: F32 | None = Field(None, description="-2.0 to 2.0, times the count of a token so far.")
    top_k: I32 | None = Field(None, description="Sample from this many likeliest tokens; at least 1.")
    top_p: F32 | None = Field(None, description="Sample from the smallest set with this probability; between 0 and 1.")
    typical_p: F32 | None = Field(None, description="Typical decoding mass; between 0 and 1.")
    do_sample: bool = Field(False, description="Sample instead of taking the likeliest token.")
    max_new_tokens: U32 | None = Field(None, description="Most tokens to generate; by default what fits.")
    return_full_text: bool | None = Field(None, description="Put the prompt in front of the generated text.")
    stop: list[str] = Field([], description="Texts that end the generation; the match stays in the output.")
    truncate: U64 | None = Field(None, description="Keep only this many last tokens of the prompt.")
    watermark: bool = Field(False, description="Watermark the text.")
    details: bool = Field(False, description="Add `details` to the answer.")
    decoder_input_details: bool = Field(False, description="Add the prompt's log-probabilities; not on streams.")
    seed: U64 | None = Field(None, description="Seed of the sampling; random by default.")
    top_n_tokens: U32 | None = Field(None, description="Report this many likeliest tokens at each position.")
    grammar: GrammarType | None = Field(None, description="Constrain the output.")
    adapter_id: str | None = Field(None, description="LoRA adapter; unknown ones mean the base model.")
    ignore_eos_token: bool = Field(
        False,
        description="Extension: the end-of-sequence token does not end the generation.",
        json_schema_extra=EXTENSION,
    )
    min_new_tokens: U32 | None = Field(
        None,
        description="Extension: neither end of sequence nor stop texts act before this many tokens.",
        json_schema_extra=EXTENSION,
    )


# A body without `parameters` samples, one with `{}` does not: TGI's quirk.
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
    """Body of `/`: the same, and whether to stream."""

    stream: bool = False
