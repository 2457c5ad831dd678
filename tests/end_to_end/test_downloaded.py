"""The launcher serves a model that its download step prepared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from reference_server.presets.catalog import find_adapter
from tests.support.models.tiny_models import generate_alone, make_tiny_model, save_tiny_model, text_of
from tests.support.servers.hub import fake_hub
from tests.support.servers.launched_server import serve
from tests.support.servers.ports import free_port

PROMPT = [7, 3, 11, 42]
MODULE = "model.layers.0.self_attn.q_proj"


@pytest.mark.slow
def test_an_adapter_of_a_private_repository_is_served_merged_into_a_base_that_is_pickled(tmp_path, monkeypatch):
    model = make_tiny_model("llama", tie_word_embeddings=True)
    base = save_tiny_model(tmp_path / "base", "llama", tie_word_embeddings=True)
    (base / "model.safetensors").unlink()
    torch.save(model.state_dict(), base / "pytorch_model.bin")
    factors = {"A": torch.randn(2, 48), "B": torch.randn(48, 2)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "some/base"}
    adapter = {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": save({f"base_model.model.{MODULE}.lora_{n}.weight": factors[n] for n in "AB"}),
    }
    with torch.no_grad():
        model.get_submodule(MODULE).weight += 2 * factors["B"] @ factors["A"]
    root = str(Path.cwd())
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    with fake_hub() as hub:
        hub.add("some/base", {path.name: path.read_bytes() for path in base.iterdir()})
        hub.add("some/adapter", adapter, token="hf_secret")
        places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}
        flags = ("--model-id", "some/adapter", "--dtype", "float32")
        with serve(*flags, **places, PYTHONPATH=root) as server:
            ids = server.token_ids(text_of(PROMPT))

            assert ids == generate_alone(model, PROMPT, 12)
            assert "hf_secret" not in server.output
    converted = load_file(next((tmp_path / "home").rglob("model.safetensors")))
    assert "model.embed_tokens.weight" in converted
    assert "lm_head.weight" not in converted


@pytest.mark.slow
def test_a_downloaded_model_is_served_without_a_hub(tmp_path):
    base = save_tiny_model(tmp_path / "base", "llama")
    places = {"HF_HOME": str(tmp_path / "home")}
    with fake_hub() as hub:
        hub.add("some/base", {path.name: path.read_bytes() for path in base.iterdir()})
        words = [sys.executable, "-m", "reference_server.model_server.cli", "download-weights", "some/base"]
        subprocess.run(words, env={**os.environ, **places, "HF_ENDPOINT": hub.url}, check=True, timeout=60)

    with serve("--model-id", "some/base", "--dtype", "float32", **places, HF_HUB_OFFLINE="1") as server:
        ids = server.token_ids(text_of(PROMPT))

    assert ids == generate_alone(make_tiny_model("llama"), PROMPT, 12)


@pytest.mark.slow
def test_the_launcher_downloads_adapters_and_then_serves_them_without_a_hub(tmp_path):
    """Three launches: from the hub, from its cache, and with an adapter that the hub does not have."""
    files = find_adapter("preset:exclaim")
    assert files is not None
    places = {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}
    asked = {"inputs": "Once upon a time", "parameters": {"adapter_id": "clerk", "max_new_tokens": 24}}
    with fake_hub() as hub:
        hub.add("some/adapter", {path.name: path.read_bytes() for path in files.iterdir()}, "v2", token="hf_secret")
        flags = ("--lora-adapters", "clerk=some/adapter@v2,own=preset:exclaim")
        with serve(*flags, **places, HF_ENDPOINT=hub.url) as server:
            text = server.post("/generate", asked)
            lines = server.output.splitlines()
        num_requests = len(hub.requests)
        lost = subprocess.run(
            [
                *(sys.executable, "-m", "reference_server.launcher.cli", "--model-id", "preset:tiny-llama"),
                *("--lora-adapters", "some/missing", "--port", str(free_port())),
            ],
            env={**os.environ, **places, "HF_ENDPOINT": hub.url},
            capture_output=True,
            text=True,
            timeout=120,
        )

    with serve(*flags, **places, HF_HUB_OFFLINE="1") as server:
        again = server.post("/generate", asked)
        same = server.post("/generate", {**asked, "parameters": {**asked["parameters"], "adapter_id": "own"}})

    assert text == again == same
    assert "!" in text["generated_text"]
    assert num_requests > 0
    steps = ("Downloaded the adapter some/adapter", "Waiting for 1 shard(s)")
    first, second = (next(n for n, line in enumerate(lines) if each in line) for each in steps)
    assert first < second
    assert lost.returncode == 1
    assert "Error: DownloadError: could not load the adapter some/missing" in lost.stdout + lost.stderr
    assert "set --lora-adapters some/missing=PATH to a local directory" in lost.stdout + lost.stderr
    assert "hf_secret" not in lost.stdout + lost.stderr + "".join(lines)
