"""The server's exceptions.

ServerError
├── StartupError                        process error: message on stderr, exit code 1
│   ├── ArgumentError                   a flag, or a combination of flags, that cannot work
│   └── UnsupportedError                a model, device or feature that is not served, refused by name
├── ShardError                          a shard call failed; carries the shard's message
│   ├── ShardConnectionError            the shard could not be reached
│   └── StepTimeoutError                a step took longer than `step_timeout`; the shard is unreliable from then on
└── RequestError                        one request ends with an HTTP status and TGI's `error_type`
    ├── ValidationError                 422 validation
    ├── AdapterNotFoundError            404 not_found
    ├── TemplateError                   422 template_error
    ├── ToolError                       422 tool_error
    ├── GenerationError                 424 generation
    ├── OverloadedError                 429 overloaded
    ├── IncompleteGenerationError       500 incomplete_generation
    ├── UnhealthyError                  503 healthcheck
    └── DrainingError                   503 draining
"""

from typing import ClassVar


class ServerError(Exception):
    """Base of the server's exceptions."""


class StartupError(ServerError):
    """The process cannot start; the message has the cause and a remedy."""


class ArgumentError(StartupError):
    """A setting, or a combination of settings, that cannot work."""


class UnsupportedError(StartupError):
    """A requested model, device or feature is not supported."""


class ShardError(ServerError):
    """A shard answered a call with an error; the text is the shard's message."""


NOT_WARMED_UP = "Prefill before Warmup"
"""Start of the error of a prefill on a model server without a warm-up; the wire carries no kinds of errors."""


class ShardConnectionError(ShardError):
    """A shard could not be reached."""


class StepTimeoutError(ShardError):
    """A shard did not answer a step in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"step timed out after {limit_s:g} s")


#: Longer error texts to clients are cut.
MAX_ERROR_CHARACTERS = 300


class RequestError(ServerError):
    """Ends one request. `str()` is the text sent as `error`."""

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    prefix: ClassVar[str] = ""

    def __init__(self, detail: str) -> None:
        super().__init__(shorten_error(f"{self.prefix}{detail}"))
        self.detail = detail


def shorten_error(text: str) -> str:
    """`text`, cut to `MAX_ERROR_CHARACTERS`."""
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[: MAX_ERROR_CHARACTERS - 1]}…"


class ValidationError(RequestError):
    """The request breaks a validation rule."""

    status = 422
    error_type = "validation"
    prefix = "Input validation error: "


class AdapterNotFoundError(RequestError):
    """No such adapter is loaded."""

    status = 404
    error_type = "not_found"


class TemplateError(RequestError):
    """The chat template is missing or failed."""

    status = 422
    error_type = "template_error"
    prefix = "Template error: "


class ToolError(RequestError):
    """A tool choice or a tool call is wrong."""

    status = 422
    error_type = "tool_error"
    prefix = "Tool error: "


class GenerationError(RequestError):
    """The model server failed while this request was in its batch."""

    status = 424
    error_type = "generation"
    prefix = "Request failed during generation: "


class OverloadedError(RequestError):
    """No permit is free, or the request waited too long."""

    status = 429
    error_type = "overloaded"

    def __init__(self, detail: str = "Model is overloaded") -> None:
        super().__init__(detail)


class IncompleteGenerationError(RequestError):
    """The shard stopped answering before the generation's last token."""

    error_type = "incomplete_generation"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


class UnhealthyError(RequestError):
    """The model server does not answer its health check."""

    status = 503
    error_type = "healthcheck"

    def __init__(self) -> None:
        super().__init__("unhealthy")


class DrainingError(RequestError):
    """The router stops: it finishes its requests and takes no more."""

    status = 503
    error_type = "draining"

    def __init__(self) -> None:
        super().__init__("draining")
