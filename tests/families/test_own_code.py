"""Models with their own code: it runs only with `trust_remote_code`, in the padded tier."""

import json
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from reference_server.errors import UnsupportedError
from reference_server.model_server.calls.local_shard import LocalShard
from tests.support.models.lower_tiers import PADDED, PROMPTS, generate_alone, run_together, save_model
from tests.support.models.tiny_shards import tiny_options, warm_up

CODE = """
from transformers import GPTNeoConfig, GPTNeoForCausalLM


class OwnConfig(GPTNeoConfig):
    model_type = "of-its-own"


class OwnModel(GPTNeoForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "model"
    save_model(model, PADDED["gpt-neo"])
    (model / "own_code.py").write_text(CODE)
    config = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    (model / "config.json").write_text(json.dumps(config | {"model_type": "of-its-own", "auto_map": names}))
    return model


def test_code_of_a_model_does_not_run_by_default(directory: Path) -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"of-its-own: it needs the code in its repository, .*runs only with `--trust-remote-code`",
    ):
        LocalShard.load(tiny_options(directory))

    assert not (directory.parent / "modules").exists()


async def test_trusted_code_runs_padded(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    same_weights = save_model(tmp_path_factory.mktemp("plain"), PADDED["gpt-neo"])

    shard = LocalShard.load(tiny_options(directory, trust_remote_code=True))
    await warm_up(shard)
    together = await run_together(shard)
    shard.close()

    assert together == [generate_alone(same_weights, prompt) for prompt in PROMPTS]
    assert "running own_code.OwnModel, code in the repository of" in caplog.text


async def test_a_served_family_never_runs_the_code_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "model"
    save_model(model, PADDED["codegen"])
    config = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    (model / "config.json").write_text(json.dumps(config | {"auto_map": names}))

    shard = LocalShard.load(tiny_options(model, trust_remote_code=True))
    shard.close()

    assert not (tmp_path / "modules").exists()
