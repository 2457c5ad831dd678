"""`text-generation-server quantize`: from a command line to a checkpoint, or to an error and no files."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reference_server.model_server.cli import main
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.quantization.linear import QuantizedLinear
from tests.support.models.tiny_models import save_tiny_model
from tests.support.samples.logs import kept_logging
from tests.support.servers import launched_server

QUICK = ("--nsamples", "8", "--seqlen", "128")
IDS = torch.tensor([range(100, 164)])


@pytest.fixture(autouse=True)
def logging_and_threads_as_before():
    """Use one thread: small products are faster on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with kept_logging():
        yield
    torch.set_num_threads(threads)


@torch.no_grad()
def logits(model_id: str, quantize: str | None = None) -> tuple[loader.LoadedModel, torch.Tensor]:
    options = EngineOptions(model_id, dtype="float32", quantize=quantize, tier="padded")
    loaded = loader.load(options, loader.locate(options), RankGroup())
    return loaded, loaded.model(IDS, use_cache=False).logits


def test_model_server_M27_the_trained_preset_is_quantized_on_its_own_text_and_loads(tmp_path, capfd):
    out = str(tmp_path / "out")

    code = main(["quantize", "preset:tiny-llama", out, *QUICK])

    assert code == 0
    shown = capfd.readouterr().out
    assert "Groups of 64 inputs" in shown
    assert "Quantize: [4/4] -- ETA: 0:00:00" in shown
    loaded, found = logits(out, quantize="gptq")
    plain = logits("preset:tiny-llama")[1]
    layers = loaded.model.base_model
    assert sum(isinstance(module, QuantizedLinear) for module in layers.modules()) == 4 * 7
    assert loaded.quantization is not None
    assert loaded.quantization.scheme.name == "gptq"
    assert 0.005 < ((found - plain).norm() / plain.norm()).item() < 0.15


def test_options_reach_the_checkpoint(tmp_path, capfd):
    source = save_tiny_model(tmp_path / "plain", "llama", hidden_size=64)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number * 7 % 100}" for number in range(200)))
    flags = ("--bits", "8", "--groupsize", "32", "--percdamp", "0.05", "--act-order", "--static-groups", "--sym",
             "false", "--calibration-file", str(text), "--nsamples", "3", "--seqlen", "16", "--seed", "4")  # fmt: skip

    code = main(["quantize", str(source), str(tmp_path / "out"), *flags])

    assert code == 0
    assert "Calibrating on 3 windows of 16 tokens" in capfd.readouterr().out
    settings = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    expected = {
        "bits": 8, "group_size": 32, "damp_percent": 0.05, "desc_act": True, "static_groups": True, "sym": False
    }  # fmt: skip
    assert expected.items() <= settings.items()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--bits", "3"), 1, "`bits` is 3, but must be 2, 4 or 8"),
        (("--groupsize", "0"), 1, "`groupsize` is 0: give a number of inputs, or -1"),
        (("--static-groups",), 1, "`static_groups` has no effect without `act_order`"),
        (("--percdamp", "1"), 2, "percdamp"),
        (("--seqlen", "100000"), 1, "`--seqlen` is 100000 but the model has 16384 positions"),
        (("--calibration-file", "/nowhere.txt"), 1, "could not read `--calibration-file /nowhere.txt`"),
        (("--upload-to-model-id", "me/mine"), 1, "`--upload-to-model-id me/mine` is not served yet"),
    ],
)
def test_invalid_options_are_refused_by_name(tmp_path, capsys, flags, code, message):
    def run() -> int:
        try:
            return main(["quantize", "preset:tiny-llama", str(tmp_path / "out"), *flags])
        except SystemExit as stopped:
            return int(stopped.code or 0)

    assert run() == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_used_directory_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").touch()

    assert main(["quantize", "preset:tiny-llama", str(tmp_path), *QUICK]) == 1
    assert "is not empty: use a new directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_without_text_and_hub_the_error_names_both(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(tmp_path / "cache"))
    source = save_tiny_model(tmp_path / "plain", "llama")

    assert main(["quantize", str(source), str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert "dataset Salesforce/wikitext" in message
    assert "use your own text with `--calibration-file`" in message


@pytest.mark.slow
def test_a_signal_during_calibration_leaves_no_files(tmp_path):
    command = [sys.executable, "-m", "reference_server.model_server.cli", "quantize", "preset:tiny-llama"]
    endless = ("--nsamples", "2000", "--seqlen", "256")
    processes = [
        (number, subprocess.Popen([*command, str(tmp_path / number.name), *endless], stdout=subprocess.PIPE, text=True))
        for number in (signal.SIGINT, signal.SIGTERM)
    ]

    for number, process in processes:
        assert process.stdout is not None
        assert any("Calibrating on" in line for line in process.stdout)
        process.send_signal(number)
        process.communicate(timeout=600)

    assert [process.returncode for _, process in processes] == [130, 143]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_launcher_serves_the_written_checkpoint(tmp_path: Path):
    out = str(tmp_path / "out")
    assert main(["quantize", "preset:tiny-llama", out, *QUICK]) == 0

    with launched_server.serve("--model-id", out, "--quantize", "gptq") as server:
        ids = server.token_ids("Testing API", max_new_tokens=8)
        engine = server.get("/info")["engine"]

    assert len(ids) == 8
    assert engine["quantize"] == "gptq"
