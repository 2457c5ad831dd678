"""The wire's descriptor set equals the compiled files of `proto/` and the recorded table of TGI's protocol.

`wire_fields.json` holds, for either version, every message's fields as name: [number, type] and every enum's values.
"""

import json
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from reference_server.transport.wire_schema import DESCRIPTOR_SET, VERSIONS, load_schema

ROOT = Path(__file__).parents[2]
RECORDED = json.loads(Path(__file__).with_name("wire_fields.json").read_text())
RPCS = ["Info", "ServiceDiscovery", "ClearCache", "FilterBatch", "Warmup", "Prefill", "Decode", "Health"]
EXTENSIONS = {"v2": [], "v3": ["LoadAdapter", "UnloadAdapter"]}
"""Calls that follow TGI's eight."""


def test_descriptor_set_equals_the_compiled_proto_files(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools comes with the dev extra")
    out = tmp_path / "generate.binpb"

    code = protoc.main(
        ["protoc", f"--proto_path={ROOT / 'proto'}", "--include_imports", f"--descriptor_set_out={out}"]
        + [f"{version}/generate.proto" for version in sorted(VERSIONS)]
    )

    assert code == 0
    assert FileDescriptorSet.FromString(out.read_bytes()) == committed(), "run `make proto`"


@pytest.mark.parametrize("version", VERSIONS)
def test_fields_and_enums_are_the_recorded_ones(version):
    file = file_of(version)

    assert {message.name: fields_of(message) for message in file.message_type} == RECORDED[version]["messages"]
    assert {enum.name: {value.name: value.number for value in enum.value} for enum in file.enum_type} == (
        RECORDED[version]["enums"]
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_input_chunk_is_one_of_its_fields(version):
    oneofs = [message.name for message in file_of(version).message_type if real_oneofs(message)]

    assert oneofs == (["InputChunk"] if version == "v3" else [])


@pytest.mark.parametrize("version", VERSIONS)
def test_service_has_the_eight_unary_calls_and_those_of_adapters(version):
    (service,) = file_of(version).service
    methods = [(rpc.name, rpc.input_type, rpc.output_type) for rpc in service.method]
    streaming = [rpc.name for rpc in service.method if rpc.client_streaming or rpc.server_streaming]

    assert service.name == "TextGenerationService"
    assert file_of(version).package == f"generate.{version}"
    assert streaming == []
    assert methods == [
        (rpc, f".generate.{version}.{rpc}Request", f".generate.{version}.{rpc}Response")
        for rpc in [*RPCS, *EXTENSIONS[version]]
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_schema_gives_the_method_paths(version):
    schema = load_schema(version)

    assert [method.path for method in schema.methods.values()] == [
        f"/generate.{version}.TextGenerationService/{rpc}" for rpc in [*RPCS, *EXTENSIONS[version]]
    ]


def committed() -> FileDescriptorSet:
    return FileDescriptorSet.FromString(DESCRIPTOR_SET.read_bytes())


def file_of(version: str) -> FileDescriptorProto:
    return next(file for file in committed().file if file.package == f"generate.{version}")


def fields_of(message: DescriptorProto) -> dict[str, list[object]]:
    entries = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    return {field.name: [field.number, type_of(field, entries)] for field in message.field}


def type_of(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    """The type as the table writes it: `opt uint32`, `rep Request`, `map<string, string>`."""
    name = field.type_name.rpartition(".")[2]
    if name in entries:
        key, value = entries[name].field
        return f"map<{plain_type(key)}, {plain_type(value)}>"
    label = "rep " if field.label == FieldDescriptorProto.LABEL_REPEATED else "opt " if field.proto3_optional else ""
    return label + (name or plain_type(field))


def plain_type(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def real_oneofs(message: DescriptorProto) -> list[str]:
    """The declared oneofs. They come before the synthetic ones, which `optional` fields create."""
    synthetic = sum(field.proto3_optional for field in message.field)
    return [oneof.name for oneof in message.oneof_decl][: len(message.oneof_decl) - synthetic]
