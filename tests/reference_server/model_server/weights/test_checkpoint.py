"""Weight files: which are read, lazily, in both formats; damaged and hostile ones are refused by name."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reference_server.errors import StartupError
from reference_server.model_server.weights.checkpoint import Checkpoint, weight_files
from reference_server.model_server.weights.cut import Cut

WEIGHT = torch.arange(12.0).view(4, 3)


def saved(directory: Path, name: str) -> Path:
    if name.endswith(".safetensors"):
        save_file({"weight": WEIGHT, "scalar": torch.tensor(2.0)}, directory / name)
    else:
        torch.save({"weight": WEIGHT, "scalar": torch.tensor(2.0)}, directory / name)
    return directory


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "weights.pt"])
def test_a_part_of_a_weight_is_read_from_either_format(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint.open(saved(tmp_path, name))

    assert checkpoint.shapes == {"weight": (4, 3), "scalar": ()}
    assert torch.equal(checkpoint.read("weight"), WEIGHT)
    assert torch.equal(checkpoint.read("weight", Cut(1, ((0, 1), (2, 3)))), WEIGHT[:, [0, 2]])
    assert checkpoint.read("scalar").item() == 2.0


def test_an_old_pickle_and_a_nested_one_are_read(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": WEIGHT}}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)

    assert torch.equal(Checkpoint.open(tmp_path).read("weight"), WEIGHT)


def test_reliability_T20_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return print, ("run",)

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Runs()}, protocol=2))

    with pytest.raises(StartupError, match="is unsafe and was not read: it refers to print"):
        Checkpoint.open(tmp_path)


def test_an_index_names_the_files(tmp_path: Path) -> None:
    save_file({"a": WEIGHT}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": WEIGHT + 1}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"c": WEIGHT}, tmp_path / "consolidated.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    checkpoint = Checkpoint.open(tmp_path)

    assert sorted(checkpoint.shapes) == ["a", "b"]
    assert torch.equal(checkpoint.read("b"), WEIGHT + 1)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "..", "sub/model.safetensors"])
def test_reliability_T22_an_index_names_plain_files_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))

    with pytest.raises(StartupError, match="not a file in the same folder"):
        Checkpoint.open(tmp_path)


def test_an_index_of_files_that_are_not_there_names_them(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))

    with pytest.raises(StartupError, match=r"not there: gone\.safetensors"):
        Checkpoint.open(tmp_path)


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    saved(saved(tmp_path, "pytorch_model.bin"), "model.safetensors")

    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]


def test_hardening_R23_one_name_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    saved(saved(tmp_path, "first.safetensors"), "second.safetensors")

    with pytest.raises(StartupError, match=r"is in first\.safetensors and in second\.safetensors of "):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
         "'a' twice"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,400]}}', "no readable file of weights"),
        (b'{"a":{"dtype":"F32","shape":[7],"data_offsets":[0,4]}}', "no readable file of weights"),
        (b"[]", "no table of tensors"),
        (b"{", "no readable file of weights"),
    ],
)  # fmt: skip
def test_reliability_T21_a_false_header_is_refused(tmp_path: Path, header: bytes, reason: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))

    with pytest.raises(StartupError, match=reason):
        Checkpoint.open(tmp_path)


def test_reliability_T21_an_endless_header_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")

    with pytest.raises(StartupError, match="are the most"):
        Checkpoint.open(tmp_path)


def test_a_directory_without_weights_is_refused_with_this_reason(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no weights found in"):
        Checkpoint.open(tmp_path)
