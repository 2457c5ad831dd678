"""Files of a model author, damaged in any way: read as they are or refused, with an error that has its place."""

import contextlib
import json
import random

import pytest
import torch
from safetensors.torch import save

from reference_server.errors import StartupError
from reference_server.model_server.weights.adapter import Adapter
from reference_server.model_server.weights.checkpoint import open_weights
from reference_server.model_server.weights.convert import convert_file
from reference_server.model_server.weights.files import weight_files

CASES = 150
VALUES = [None, True, -1, 0, 2**70, 0.5, "", "..", "/x", "a" * 300, [], [[]], {}, {"a": 1}, float("nan")]


def damaged(content: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, cut out or doubled."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        position = draw.randrange(len(changed))
        match draw.randrange(3):
            case 0:
                changed[position] = draw.randrange(256)
            case 1:
                del changed[position : position + draw.randint(1, 40)]
            case _:
                changed[position:position] = changed[position : position + draw.randint(1, 40)]
        changed = changed or bytearray(b"\0")
    return bytes(changed)


def pickled(tmp_path, zipped):
    shared = torch.arange(6.0)
    path = tmp_path / "whole.bin"
    torch.save({"a": shared, "b": shared, "c": torch.ones(2, 2).half()}, path, _use_new_zipfile_serialization=zipped)
    return path.read_bytes()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_pickle_is_converted_or_refused(tmp_path, zipped):
    content, draw = pickled(tmp_path, zipped), random.Random(1)
    source, target = tmp_path / "pytorch_model.bin", tmp_path / "model.safetensors"
    refused = 0
    for _ in range(CASES):
        source.write_bytes(damaged(content, draw))
        try:
            convert_file(source, target)
            open_weights(target)
        except StartupError:
            refused += 1
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []

    assert refused


def test_damaged_safetensors_are_read_or_refused(tmp_path):
    content, draw = save({"a": torch.ones(2, 3), "b": torch.ones(1)}, {"format": "pt", "c": "a"}), random.Random(2)
    path = tmp_path / "model.safetensors"
    refused = 0
    for _ in range(CASES):
        path.write_bytes(damaged(content, draw))
        try:
            file = open_weights(path)
            for name, shape in file.shapes.items():
                assert tuple(file.read(name, None).shape) == shape
        except StartupError:
            refused += 1

    assert refused


def test_a_header_with_any_value_is_read_or_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    for field in ("dtype", "shape", "data_offsets", "__metadata__", "entry"):
        for value in VALUES:
            entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
            header = {"w": value if field == "entry" else entry | ({field: value} if field in entry else {})}
            header |= {"__metadata__": value} if field == "__metadata__" else {}
            text = json.dumps(header).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
            with contextlib.suppress(StartupError):
                open_weights(path)


@pytest.mark.parametrize(
    "name", ["r", "lora_alpha", "base_model_name_or_path", "peft_type", "init_lora_weights", "revision"]
)
def test_reliability_104_an_adapter_config_with_any_value_is_read_or_refused(tmp_path, name):
    pair = {f"base_model.model.m.lora_{n}.weight": torch.ones(2, 2) for n in "AB"}
    (tmp_path / "adapter_model.safetensors").write_bytes(save(pair))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": "some/base"}
    for value in VALUES:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {name: value}))
        try:
            adapter = Adapter.open(tmp_path)
        except StartupError:
            continue
        assert adapter.base_revision is None or isinstance(adapter.base_revision, str)


def test_reliability_99_an_index_with_any_value_is_read_or_refused(tmp_path):
    for value in [*VALUES, {"w": None}, {"w": ["x"]}, {"w": {}}, {"w": 1, "v": "a.safetensors"}]:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
        with contextlib.suppress(StartupError):
            assert weight_files(tmp_path) == []
