"""Requests of the cloud platforms' routes."""

from typing import Annotated

from pydantic import Field

from reference_server.router.schemas.openai import ChatRequest
from reference_server.router.schemas.scalars import U64, ApiModel
from reference_server.router.schemas.tgi import ABSENT_PARAMETERS, GenerateParameters

Byte = Annotated[int, Field(ge=0, le=255)]


class VertexGenerate(ApiModel):
    """A prompt. Of the parameters only `max_new_tokens` and `seed` have an effect."""

    inputs: str
    parameters: GenerateParameters | None = None


VertexInstance = Annotated[VertexGenerate | ChatRequest, Field(union_mode="left_to_right")]


class VertexRequest(ApiModel):
    """Body of `/vertex`: prompts and conversations; the answer has one text for each."""

    instances: list[VertexInstance]


class InferInput(ApiModel):
    """A prompt as the bytes of its UTF-8 text."""

    name: str
    shape: list[U64]
    datatype: str
    data: list[Byte]


class InferOutput(ApiModel):
    name: str


class InferRequest(ApiModel):
    """Body of KServe's `infer`."""

    id: str
    inputs: list[InferInput]
    outputs: list[InferOutput]
    parameters: GenerateParameters = ABSENT_PARAMETERS
