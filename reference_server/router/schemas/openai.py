"""The OpenAI routes' requests, field for field."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from reference_server.router.decoder import JsonObject
from reference_server.router.schemas.scalars import F32, U32, U64, ApiModel
from reference_server.router.schemas.tgi import ANY_JSON_OBJECT, EXTENSION, RequestGrammar


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


#: The prompt's text about tools, if the request has none: TGI's text unchanged, since it affects what models answer.
DEFAULT_TOOL_PROMPT = (
    "Given the functions available, please respond with a JSON for a function call with its proper arguments that best "
    "answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument name and "
    "its value}.Do not use variables."
)

StopField = Annotated[list[str] | None, BeforeValidator(_as_list)]


class SamplingFields(ApiModel):
    """Fields of both completions and chat."""

    model: str | None = Field(None, description="Adapter; `tgi` or null selects the base model.")
    max_tokens: U32 | None = Field(None, description="Maximum of generated tokens; by default as many as fit.")
    max_completion_tokens: U32 | None = Field(None, description="The newer name of `max_tokens`.")
    temperature: F32 | None = Field(None, description="0 selects greedy decoding.")
    top_p: F32 | None = Field(None, description="Sample from the smallest set with this probability; 1 is off.")
    frequency_penalty: F32 | None = None
    presence_penalty: F32 | None = Field(None, description="-2.0 to 2.0, applied once to each token already generated.")
    stop: StopField = Field(None, description="One text or several that end the generation.")
    stream: bool | None = Field(None, description="null means false.")
    seed: U64 | None = None
    n: U64 | None = Field(None, description="Number of choices; each is a separate generation.")
    logit_bias: dict[str, Any] | list[Any] | None = Field(None, description="Must be empty.")
    store: bool | None = Field(None, description="Must be false.")
    service_tier: str | None = Field(None, max_length=64, description="Must be `auto` or `default`.")
    ignore_eos_token: bool | None = Field(
        None,
        description="Extension: do not stop at the end-of-sequence token.",
        json_schema_extra=EXTENSION,
    )
    ignore_eos: bool | None = Field(
        None, description="Extension: vLLM's name of `ignore_eos_token`.", json_schema_extra=EXTENSION
    )
    min_new_tokens: U32 | None = Field(
        None,
        description="Extension: do not stop at end of sequence or at stop texts before this many tokens.",
        json_schema_extra=EXTENSION,
    )


class CompletionRequest(SamplingFields):
    """Body of `/v1/completions`."""

    prompt: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1, description="One prompt or several.")]
    suffix: str | None = Field(None, description="Must be empty.")
    echo: bool | None = Field(None, description="Must be false.")
    logprobs: bool | U32 | None = Field(None, description="Must be false or 0; chat supports it.")
    best_of: U64 | None = Field(None, description="At most `n`: every choice is returned.")
    repetition_penalty: F32 | None = None


class ImageUrl(ApiModel):
    url: str


class ContentPart(ApiModel):
    """A part of a message: text, or the URL of an image."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _has_its_content(self) -> "ContentPart":
        if (self.text if self.type == "text" else self.image_url) is None:
            raise ValueError(f"missing field `{self.type}`")
        return self

    @property
    def flattened(self) -> str:
        if self.type == "text":
            return self.text or ""
        assert self.image_url is not None
        return f"![]({self.image_url.url})"


class CalledFunction(ApiModel):
    name: str
    arguments: Any = Field(...)
    description: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_either_spelling(cls, data: Any) -> Any:
        return one_spelling(data, "arguments", "parameters")


class MessageToolCall(ApiModel):
    id: str
    type: str
    function: CalledFunction

    @property
    def flattened(self) -> dict[str, Any]:
        """The call as templates get it: `arguments` as JSON text, so a string is encoded twice."""
        arguments = json.dumps(self.function.arguments, ensure_ascii=False, separators=(",", ":"))
        return {
            "id": self.id,
            "type": self.type,
            "function": {
                "description": self.function.description,
                "name": self.function.name,
                "arguments": arguments,
            },
        }


class ChatMessage(ApiModel):
    """One message: `content`, or else `tool_calls`. A tool's answer is `content` with the role `tool`."""

    role: str = Field(max_length=256)
    content: str | list[ContentPart] | None = None
    tool_calls: list[MessageToolCall] | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_calls_beside_content(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("content") is not None:
            return replaced(data, {key: value for key, value in data.items() if key != "tool_calls"})
        return data

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and self.tool_calls is None:
            raise ValueError("missing field `content`")
        return self

    @property
    def flattened(self) -> str:
        """The content as one string; templates get this and the role."""
        if isinstance(self.content, str):
            return self.content
        if self.content is not None:
            return "".join(part.flattened for part in self.content)
        calls = [call.flattened for call in self.tool_calls or ()]
        return json.dumps(calls, ensure_ascii=False, separators=(",", ":"))


class FunctionDefinition(ApiModel):
    """A function that the model may call; without `parameters` it has no arguments."""

    name: str = Field(max_length=256)
    description: str | None = None
    parameters: Any = Field(None, description="JSON schema of an object: its properties are the arguments.")

    @model_validator(mode="before")
    @classmethod
    def _take_either_spelling(cls, data: Any) -> Any:
        return one_spelling(data, "parameters", "arguments")

    @property
    def schema_of_arguments(self) -> Any:
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters


class Tool(ApiModel):
    type: str
    function: FunctionDefinition


class ToolChoiceFunction(ApiModel):
    name: str


class ToolChoiceObject(ApiModel):
    type: Literal["function"] = Field("function", description="Optional, since huggingface_hub omits it.")
    function: ToolChoiceFunction


class StreamOptions(ApiModel):
    include_usage: bool = False


class ResponseFormat(ApiModel):
    """TGI's forms and OpenAI's."""

    type: Literal["json", "json_object", "json_schema", "regex", "text"]
    value: Any = None
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> "ResponseFormat":
        if self.value is not None and self.json_schema is not None:
            raise ValueError("`value` and `json_schema` exclude each other")
        if self.json_schema is not None and "schema" not in self.json_schema:
            raise ValueError("missing field `json_schema.schema`")
        if self.value is None and self.json_schema is None and self.type not in ("json_object", "text"):
            raise ValueError("missing field `value`")
        if self.type != "text":
            self.grammar()
        return self

    def grammar(self) -> RequestGrammar | None:
        """The requested constraint."""
        if self.type == "text":
            return None
        if self.json_schema is not None:
            return RequestGrammar(type="json_schema", value=self.json_schema)
        if self.value is None:
            return ANY_JSON_OBJECT
        return RequestGrammar(type=self.type, value=self.value)


class ChatRequest(SamplingFields):
    """Body of `/v1/chat/completions` and `/chat_tokenize`."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = Field(None, max_length=512, description="Functions that the answer may call.")
    tool_choice: str | ToolChoiceObject | None = Field(
        None, description="`auto` (the default), `none`, `required`, or one function by its name."
    )
    tool_prompt: str | None = Field(
        None,
        description="Text about the tools, appended to the last message.",
        json_schema_extra={"example": DEFAULT_TOOL_PROMPT},
    )
    response_format: ResponseFormat | None = None


def one_spelling(data: Any, name: str, alias: str) -> Any:
    """`data` with `alias` renamed to `name`. Raises `ValueError` if it has both."""
    if not isinstance(data, dict) or alias not in data:
        return data
    if name in data or alias in getattr(data, "repeated", ()):
        raise ValueError(f"duplicate field `{name}`")
    return replaced(data, {name if key == alias else key: value for key, value in data.items()})


def replaced(data: dict[str, Any], items: dict[str, Any]) -> JsonObject:
    """`items` instead of `data`, with the record of its repeated keys."""
    value = JsonObject(items)
    value.repeated = getattr(data, "repeated", frozenset())
    return value
