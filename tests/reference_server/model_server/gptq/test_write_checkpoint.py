"""Writing GPTQ checkpoints: tensors follow the definition of the format; a directory is written atomically."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from reference_server.errors import ArgumentError, StartupError
from reference_server.model_server.gptq.round_weight import GPTQSettings, round_weight
from reference_server.model_server.gptq.write_checkpoint import (
    WeightWriter,
    as_float16,
    copy_beside,
    gptq_tensors,
    new_directory,
    write_config,
)
from reference_server.model_server.weights.checkpoint import Checkpoint
from tests.support.models.checkpoints.gptq_reader import read_weight


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_a_reader_of_the_format_reads_the_rounded_weight(bits: int, symmetric: bool, act_order: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(32, 80, generator=generator)
    hessian = torch.diag(torch.rand(80, generator=generator) + 0.5)
    settings = GPTQSettings(bits, 32, act_order=act_order, symmetric=symmetric)
    rounded = round_weight(weight, hessian, settings)

    tensors = gptq_tensors(rounded)

    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert shapes == {
        "qweight": (torch.int32, (80 * bits // 32, 32)),
        "qzeros": (torch.int32, (3, 32 * bits // 32)),
        "scales": (torch.float16, (3, 32)),
        "g_idx": (torch.int32, (80,)),
    }
    found = read_weight({name: tensor.numpy() for name, tensor in tensors.items()}, bits)
    assert np.array_equal(found, rounded.dequantize(torch.float32).numpy())


def test_zeros_plus_one_never_carry_into_the_next_of_their_word() -> None:
    # Some readers add one to each zero of a word at once.
    weight = torch.rand(8, 32) + 1
    rounded = round_weight(weight, torch.eye(32), GPTQSettings(4, 32, symmetric=False))

    words = gptq_tensors(rounded)["qzeros"].numpy().view(np.uint32)

    assert all((word >> shift) & 15 < 15 for word in words.ravel().tolist() for shift in range(0, 32, 4))


def test_one_file_and_several_with_an_index_hold_the_same_tensors(tmp_path: Path) -> None:
    tensors = {f"layer.{number}.weight": torch.full((4, 4), float(number)) for number in range(5)}
    for name, limit in (("one", 1000), ("several", 130)):
        directory = tmp_path / name
        directory.mkdir()
        writer = WeightWriter(directory, max_file_bytes=limit)
        for key, tensor in tensors.items():
            writer.add(key, tensor)
        writer.finish()

        checkpoint = Checkpoint.open(directory)
        assert set(checkpoint.shapes) == set(tensors)
        assert all(torch.equal(checkpoint.read(key), tensor) for key, tensor in tensors.items())

    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert names_in(tmp_path / "several") == [*files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5 * 64}
    with safe_open(tmp_path / "one" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt", "quantized": "gptq", "origin": "tgi-bench"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("existed", [True, False])
def test_an_error_restores_the_directory(tmp_path: Path, error: type[BaseException], existed: bool) -> None:
    output = tmp_path / "deep" / "out"
    if existed:
        output.mkdir(parents=True)

    def write_half() -> None:
        with new_directory(output) as directory:
            (directory / "model.safetensors").write_text("half")
            raise error

    with pytest.raises(error):
        write_half()

    assert output.is_dir() == existed
    assert not existed or not list(output.iterdir())


def test_an_error_keeps_directories_of_another_process(tmp_path: Path) -> None:
    def write() -> None:
        with new_directory(tmp_path / "out") as directory:
            for name in ("a.safetensors", "b.safetensors"):
                (directory / name).write_text("whole")
            (tmp_path / "out" / "b.safetensors").mkdir()

    with pytest.raises(IsADirectoryError):
        write()

    assert names_in(tmp_path / "out") == ["b.safetensors"]


def test_a_finished_directory_has_only_the_files(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out") as directory:
        (directory / "model.safetensors").write_text("whole")
        (directory / "config.json").write_text("{}")
        assert not (tmp_path / "out" / "config.json").exists()

    assert names_in(tmp_path / "out") == ["config.json", "model.safetensors"]


def test_a_used_directory_or_a_file_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    for path, message in ((tmp_path, "is not empty"), (tmp_path / "notes.txt", "is a file")):
        with pytest.raises(ArgumentError, match=message), new_directory(path):
            pass

    assert names_in(tmp_path) == ["notes.txt"]


def test_a_weight_beyond_float16_is_named() -> None:
    assert as_float16("norm.weight", torch.tensor([1.5])).dtype == torch.float16
    assert as_float16("table", torch.tensor([3])).dtype == torch.int64
    with pytest.raises(StartupError, match=r"norm\.weight has a value of 65536"):
        as_float16("norm.weight", torch.tensor([65536.0], dtype=torch.bfloat16))


def test_the_config_has_the_settings_for_new_and_old_tools(tmp_path: Path) -> None:
    settings = GPTQSettings(4, 64, damping=0.02, act_order=True)

    write_config(tmp_path, {"model_type": "llama", "torch_dtype": "bfloat16"}, settings, "model.layers", ["mlp.up"])

    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("llama", "float16")
    assert config["quantization_config"] == {
        "quant_method": "gptq", "bits": 4, "group_size": 64, "damp_percent": 0.02, "desc_act": True,
        "static_groups": False, "sym": True, "true_sequential": False, "checkpoint_format": "gptq",
        "block_name_to_quantize": "model.layers", "modules_in_block_to_quantize": [["mlp.up"]],
    }  # fmt: skip
    assert json.loads((tmp_path / "quantize_config.json").read_text()) == config["quantization_config"]


def test_tokenizer_and_generation_settings_are_copied_and_weights_are_not(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    kept = ["chat_template.jinja", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer.model"]
    left = ["config.json", "model.safetensors", "model.safetensors.index.json", "README.md", "quantize_config.json"]
    source.mkdir()
    output.mkdir()
    for name in kept + left:
        (source / name).write_text(name)

    copy_beside(source, output)

    assert names_in(output) == kept
