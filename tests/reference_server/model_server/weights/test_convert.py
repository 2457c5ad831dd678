"""Pickled weights become safetensors in the same folder: nothing is run, lost, or written twice."""

import doctest
import os
import pickle
from collections import namedtuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from reference_server.errors import StartupError
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models.loader import load, locate
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.weights import convert as convert_module
from reference_server.model_server.weights.checkpoint import Checkpoint
from reference_server.model_server.weights.convert import convert, convert_file, tied_names
from tests.support.models.tiny_models import make_tiny_model, save_word_tokenizer


@pytest.fixture
def converted(tmp_path):
    """A function that pickles a state, converts it, and returns the written file."""

    def convert_state(state):
        torch.save(state, tmp_path / "pytorch_model.bin")
        convert_file(tmp_path / "pytorch_model.bin", tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    return convert_state


def metadata_of(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def bits(tensor):
    """Bytes are compared, because NaN differs from itself, and zeros of both signs are equal."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_model_server_M26_tied_tensors_are_one_and_the_metadata_maps_the_dropped_name(tmp_path):
    model = make_tiny_model("llama", tie_word_embeddings=True)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    save_word_tokenizer(tmp_path)
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    torch.save(state, tmp_path / "pytorch_model.bin")

    convert(tmp_path, ["pytorch_model.bin"])

    stored = load_file(tmp_path / "model.safetensors")
    assert sorted(stored) == sorted(name for name in state if name != "lm_head.weight")
    assert metadata_of(tmp_path / "model.safetensors") == {
        "format": "pt",
        "lm_head.weight": "model.embed_tokens.weight",
    }
    options = EngineOptions(str(tmp_path), dtype="float32")
    loaded = load(options, locate(options), RankGroup()).model
    assert all(torch.equal(weight, state[name]) for name, weight in loaded.state_dict().items())


def test_without_a_class_the_first_name_is_kept_and_both_are_read(converted):
    shared = torch.randn(4, 3)

    path = converted({"lm_head.weight": shared, "embed.weight": shared, "other": torch.ones(2)})

    checkpoint = Checkpoint.open(path.parent)
    assert sorted(load_file(path)) == ["embed.weight", "other"]
    assert torch.equal(checkpoint.read("lm_head.weight"), shared)
    assert torch.equal(checkpoint.read("embed.weight"), shared)


def test_examples_in_the_docstrings():
    assert doctest.testmod(convert_module).failed == 0


def test_bits_and_types_are_kept(converted):
    state = {
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "half": torch.randn(3, 5).half(),
        "brain": torch.randn(3, 5).bfloat16(),
        "whole": torch.arange(4),
        "one": torch.tensor(2.0),
        "none": torch.empty(0, 3),
        "turned": torch.randn(3, 5).T,
        "part": torch.randn(8)[2:5],
    }

    stored = load_file(converted(state))

    for name, tensor in state.items():
        assert stored[name].dtype == tensor.dtype
        assert stored[name].shape == tensor.shape
        assert bits(stored[name]) == bits(tensor)


def test_parts_of_one_tensor_become_tensors_of_their_own(converted):
    fused = torch.randn(6, 2)

    stored = load_file(converted({"q": fused[:2], "k": fused[2:4], "v": fused[4:]}))

    assert all(torch.equal(stored[name], fused[2 * n : 2 * n + 2]) for n, name in enumerate("qkv"))


def test_tensors_below_state_dict_are_converted_and_other_values_left_out(converted):
    assert sorted(load_file(converted({"epoch": 3, "state_dict": {"w": torch.ones(2), "step": 1}}))) == ["w"]


def test_tensors_that_overlap_have_no_suitable_name(converted, tmp_path):
    whole = torch.randn(6, 2)

    with pytest.raises(StartupError, match="a and b overlap and are not the same, so there is no suitable name"):
        converted({"a": whole[:4], "b": whole[2:]})
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(1).expand(10**6, 10**3), "w would be 4000000000 bytes and is stored in fewer"),
        (torch.eye(3).to_sparse(), "w is no plain tensor"),
    ],
)
def test_a_tensor_that_no_file_can_hold_is_refused(converted, tensor, reason):
    with pytest.raises(StartupError, match=reason):
        converted({"w": tensor})


class Hostile:
    def __reduce__(self):
        return os.system, ("echo run > hostile_ran",)


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_reliability_T20_a_pickle_that_would_run_code_is_refused_by_name(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "pytorch_model.bin"
    state = {"x": Hostile()}
    torch.save(state, source) if protocol == "torch" else source.write_bytes(pickle.dumps(state, protocol=2))

    with pytest.raises(
        StartupError, match=r"pytorch_model\.bin is unsafe and was not read: it refers to posix\.system"
    ):
        convert(tmp_path, [source.name])

    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name]


def test_a_damaged_pickle_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nothing more")

    with pytest.raises(StartupError, match=r"pytorch_model\.bin is"):
        convert(tmp_path, ["pytorch_model.bin"])


def test_several_files_get_an_index(tmp_path):
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for number, name in enumerate(names):
        torch.save({f"w{number}": torch.full((2,), float(number))}, tmp_path / name)

    convert(tmp_path, names)

    checkpoint = Checkpoint.open(tmp_path)
    assert [checkpoint.read(f"w{number}").tolist() for number in range(2)] == [[0.0, 0.0], [1.0, 1.0]]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_converted_weights_have_the_read_permissions_of_the_pickle(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin").chmod(0o644)

    convert(tmp_path, ["pytorch_model.bin"])

    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_two_files_that_would_get_one_name_are_refused(tmp_path):
    with pytest.raises(StartupError, match=r"pytorch_a\.bin, a\.bin of .* would get the same name"):
        convert(tmp_path, ["pytorch_a.bin", "a.bin"])


def test_wrongly_written_weights_are_removed(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    save = convert_module.save_file
    monkeypatch.setattr(
        convert_module, "save_file", lambda tensors, *rest, **more: save({"w": tensors["w"] + 1}, *rest, **more)
    )

    with pytest.raises(StartupError, match=r"w is not in .* what it was before the conversion"):
        convert(tmp_path, ["pytorch_model.bin"])
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_a_disk_without_room_is_named(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(100)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(399))

    with pytest.raises(StartupError, match=r"400 bytes are to be converted, and .* has 399 bytes free"):
        convert(tmp_path, ["pytorch_model.bin"])


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")

    with pytest.raises(StartupError, match=r"cannot be converted to .*missing/model\.safetensors"):
        convert_file(tmp_path / "pytorch_model.bin", tmp_path / "missing" / "model.safetensors")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ('{"architectures": ["LlamaForCausalLM"]}', {"lm_head.weight"}),
        ('{"architectures": ["NobodyForCausalLM"]}', set()),
        ("not json", set()),
    ],
)
def test_tied_names_are_those_of_the_class(tmp_path, config, names):
    (tmp_path / "config.json").write_text(config)

    assert tied_names(tmp_path) == names
