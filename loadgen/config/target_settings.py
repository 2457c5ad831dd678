"""Settings of the target: its address or command, its API, access to it, and its files."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SecretStr, field_validator, model_validator

from loadgen.config.parsing import REPEATABLE, Metavar
from loadgen.config.setting_types import FileText, Seconds, as_tuple
from loadgen.dialects.registry import API_NAMES
from loadgen.target.launched.file_cache import FileCacheState

ApiName = Annotated[str, API_NAMES]
EngineName = Literal["auto", "own", "tgi", "vllm", "sglang", "llamacpp", "trtllm", "ollama", "anthropic", "openai"]

EMBEDDED_MODEL_ID = "preset:tiny-llama"
EMBEDDED_PERMITS = 1_024
# Settings for access to one server, including its secrets.
OF_ACCESS = ("api_key", "api_key_env", "header", "ca_file", "insecure")
# Fields of a request that other settings determine.
FIELDS_OF_LOAD = (
    *("prompt", "messages", "inputs", "stream"),
    *("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", "num_predict", "n"),
)


def _check_header(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+=[ -~]*", value.get_secret_value()):
        raise ValueError("must be NAME=VALUE in printable ASCII")
    return value


def _check_variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("must be a variable's name: letters, digits and _, and no digit first")
    return value


def _parse_body(value: object) -> object:
    """A JSON object from text, or from the file after an `@`. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(Path(value[1:]).read_bytes() if value.startswith("@") else value)
    except OSError as error:
        raise ValueError(f"cannot read the file ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object")
    return parsed


VariableName = Annotated[str, AfterValidator(_check_variable), Metavar("VARIABLE")]
HeaderText = Annotated[SecretStr, AfterValidator(_check_header), Metavar("NAME=VALUE")]
UrlText = Annotated[str, Metavar("URL")]


class TargetSettings(BaseModel):
    """The server under test, and how it is started or reached."""

    url: UrlText | None = Field(
        None,
        json_schema_extra=REPEATABLE,
        description="URL of a running server to measure. Repeatable: further URLs are replicas of it, and the load is "
        "spread over all; in a file, a list.",
    )
    replicas: Annotated[tuple[UrlText, ...], BeforeValidator(as_tuple)] = Field(
        (), description="A further URL of the same server; repeatable. A repeated --url does the same."
    )
    balance: Literal["round_robin", "least_in_flight"] = Field(
        "round_robin",
        description="Replica that gets a request: the next one in turn, or the one with the fewest unfinished "
        "requests of this load (each worker counts its own).",
    )
    metrics_url: Annotated[tuple[UrlText, ...], BeforeValidator(as_tuple)] = Field(
        (),
        description="Address of the server's metrics, if it is not --url with /metrics; repeatable, for each "
        "replica. The report has the metrics of each, and their sum.",
    )
    server: Annotated[str, Metavar("COMMAND")] | None = Field(
        None,
        description="Command that starts the server to measure. Free ports are passed in PORT, MASTER_PORT and "
        "PROMETHEUS_PORT; {port} is replaced by PORT.",
    )
    model_id: Annotated[str, Metavar("ID")] = Field(
        EMBEDDED_MODEL_ID,
        min_length=1,
        description="Model of the server that is started if neither --url nor --server is given.",
    )
    api: ApiName = Field("auto", description="API of the requests. Default the API of the detected server.")
    engine: EngineName = Field(
        "auto",
        description="Kind of server. It determines how tokens are counted and lengths are forced. Default detected.",
    )
    model: str | None = Field(None, description="Model name sent on OpenAI routes. Default the server's first model.")
    api_key: SecretStr | None = Field(
        None, description="Sent as a bearer token. --api-key-env keeps it out of the command line."
    )
    api_key_env: VariableName | None = Field(None, description="Environment variable that holds the API key.")
    header: Annotated[tuple[HeaderText, ...], BeforeValidator(as_tuple)] = Field(
        (), description="Header of every request, as NAME=VALUE; repeatable. The value is not stored in results."
    )
    extra_body: Annotated[dict[str, Any] | None, BeforeValidator(_parse_body), Metavar("JSON|@FILE")] = Field(
        None,
        description="Further fields of every request's body: a JSON object, or @FILE with one. Objects are merged with "
        """those of the body, as in '{"parameters": {"top_k": 5}}'.""",
    )
    reset_cache: bool = Field(
        False,
        description="Empty the server's prefix cache before the load (vLLM, SGLang, llama.cpp), and confirm it by a "
        "request. Both sides of a comparison can then send the same texts to running servers.",
    )
    ca_file: FileText | None = Field(
        None,
        description="PEM file of the certificate authorities to trust for --url. Default the system's authorities.",
    )
    insecure: bool = Field(False, description="Do not check the server's certificate.")
    ready_timeout: Seconds = Field(600.0, gt=0, description="Longest time from the start of a server until it answers.")

    file_cache: FileCacheState = Field(
        "natural",
        description="State of the model's files in the page cache at every launch: unchanged (`natural`), dropped "
        "from it (`cold`, by posix_fadvise, without root), or read into it (`warm`). The report has the fraction "
        "that was cached.",
    )
    model_files: Annotated[tuple[FileText, ...], BeforeValidator(as_tuple)] = Field(
        (),
        description="File or folder of weights for --file-cache; repeatable. Default those in the server's command.",
    )

    @model_validator(mode="before")
    @classmethod
    def _split_urls(cls, values: object) -> object:
        """The first of several URLs is `url`, the others are `replicas`."""
        if not isinstance(values, dict) or not isinstance(values.get("url"), list | tuple):
            return values
        first, *others = values["url"] or [None]
        return values | {"url": first} | ({"replicas": tuple(others)} if others else {})

    @field_validator("replicas", "metrics_url")
    @classmethod
    def _http_urls(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(cls._http_url(value)) for value in values)

    @field_validator("url")
    @classmethod
    def _http_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value):
            raise ValueError("must look like http://HOST:PORT, without query or credentials")
        return value.rstrip("/")
