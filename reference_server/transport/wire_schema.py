"""Message classes and method paths of `generate.v2` and `generate.v3`, made at run time from `generate.binpb`.

The descriptor set is loaded into a private pool, to avoid a collision with another library's copy of the protocol.
`make proto` writes the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

DESCRIPTOR_SET = Path(__file__).with_name("generate.binpb")
VERSIONS = ("v3", "v2")

Message = Any
"""A protobuf message; its class is made at run time and has no static type."""


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC of the service: all eight are unary-unary."""

    name: str
    path: str
    request: Message
    response: Message


@dataclass(frozen=True, slots=True)
class WireSchema:
    """One version of the protocol. `messages` maps a message's short name to its class."""

    version: str
    messages: Mapping[str, Message]
    methods: Mapping[str, Method]

    @property
    def service(self) -> str:
        return f"generate.{self.version}.TextGenerationService"


@cache
def load_pool() -> DescriptorPool:
    """The private pool with both versions; reflection serves it."""
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(DESCRIPTOR_SET.read_bytes()).file:
        pool.Add(file)
    return pool


@cache
def load_schema(version: str) -> WireSchema:
    """The schema of one of `VERSIONS`."""
    assert version in VERSIONS, f"there is no schema {version!r}"
    file = load_pool().FindFileByName(f"{version}/generate.proto")
    messages = {name: GetMessageClass(descriptor) for name, descriptor in file.message_types_by_name.items()}
    service = file.services_by_name["TextGenerationService"]
    return WireSchema(
        version=version,
        messages=messages,
        methods={
            method.name: Method(
                name=method.name,
                path=f"/{service.full_name}/{method.name}",
                request=messages[method.input_type.name],
                response=messages[method.output_type.name],
            )
            for method in service.methods
        },
    )
