"""Requests for structured answers: a dialect that adds a schema or a tool to the requests that have one."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.dialects.dialect import Dialect, ParsedAnswer, Sampling, encode
from loadgen.errors import UsageError
from loadgen.http.framing import Framing
from loadgen.workloads.prompts.prompt import Prompt
from loadgen.workloads.structured import Constraint, Kind, StructuredShare, structure_of


def _tgi_schema(body: dict[str, Any], constraint: Constraint) -> None:
    body["parameters"]["grammar"] = {"type": "json", "value": constraint.schema}


def _chat_schema(body: dict[str, Any], constraint: Constraint) -> None:
    schema = {"name": constraint.name, "schema": constraint.schema, "strict": True}
    body["response_format"] = {"type": "json_schema", "json_schema": schema}


def _anthropic_schema(body: dict[str, Any], constraint: Constraint) -> None:
    body["output_config"] = {"format": {"type": "json_schema", "schema": constraint.schema}}


def _anthropic_tool(body: dict[str, Any], constraint: Constraint) -> None:
    tool = {"name": constraint.name, "description": "Record the result.", "input_schema": constraint.schema}
    body["tools"] = [tool]
    body["tool_choice"] = {"type": "tool", "name": constraint.name}


def _ollama_schema(body: dict[str, Any], constraint: Constraint) -> None:
    body["format"] = constraint.schema


def _chat_tool(body: dict[str, Any], constraint: Constraint) -> None:
    function = {"name": constraint.name, "description": "Record the result.", "parameters": constraint.schema}
    body["tools"] = [{"type": "function", "function": function}]
    body["tool_choice"] = {"type": "function", "function": {"name": constraint.name}}


# The request field of each API for a structure.
STRUCTURES: dict[tuple[str, Kind], Callable[[dict[str, Any], Constraint], None]] = {
    ("tgi", Kind.SCHEMA): _tgi_schema,
    ("openai-chat", Kind.SCHEMA): _chat_schema,
    ("openai-chat", Kind.TOOL): _chat_tool,
    ("anthropic", Kind.SCHEMA): _anthropic_schema,
    ("anthropic", Kind.TOOL): _anthropic_tool,
    ("ollama-chat", Kind.SCHEMA): _ollama_schema,
    ("ollama-generate", Kind.SCHEMA): _ollama_schema,
}


def check_structures(config: BenchConfig, api: str) -> None:
    """Raises UsageError if the API of a server has no field for the structures of a load, or their file is wrong."""
    structure = structure_of(config)
    if structure is None:
        return
    wanted = {Kind.SCHEMA} if structure.tools < 1 else set()
    wanted |= {Kind.TOOL} if structure.tools > 0 else set()
    for kind in sorted(wanted):
        if (api, kind) not in STRUCTURES:
            apis = ", ".join(each for each, known in STRUCTURES if known == kind)
            raise UsageError(f"`structured` needs a {kind}, which API {api!r} has no field for; give --api {apis}")


@dataclass(frozen=True, slots=True)
class StructuredDialect:
    """A dialect whose structured requests end where the structure does: their length is a limit and never forced."""

    plain: Dialect
    api: str
    structure: StructuredShare

    @property
    def sampling(self) -> Sampling:
        return self.plain.sampling

    @property
    def path(self) -> str:
        return self.plain.path

    @property
    def framing(self) -> Framing:
        return self.plain.framing

    @property
    def has_template(self) -> bool:
        return self.plain.has_template

    @property
    def can_force_length(self) -> bool:
        return self.plain.can_force_length

    def body(self, prompt: Prompt) -> bytes:
        body, constraint = self.plain.body(prompt), self.structure.of(prompt.prompt_id)
        if constraint is None:
            return body
        fields = json.loads(body)
        for name in self.sampling.length_fields:
            fields.pop(name, None)
            fields.get("parameters", {}).pop(name, None)
        STRUCTURES[self.api, constraint.kind](fields, constraint)
        return encode(fields)

    def refused(self, prompt: Prompt) -> str | None:
        return self.plain.refused(prompt)

    def read(self, payload: bytes, at_ns: int, answer: ParsedAnswer) -> None:
        self.plain.read(payload, at_ns, answer)

    def read_whole(self, payload: bytes, answer: ParsedAnswer) -> None:
        self.plain.read_whole(payload, answer)
