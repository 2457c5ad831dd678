"""Paths of a space file: relative to the file, whatever the working directory is."""

from pathlib import Path

import pytest

from tuner import cli
from tuner.study.space_file import read_space

PROFILES = Path(__file__).parents[3] / "tuner" / "servers" / "profiles"
PATHS = """
[study]
cost = "cost.json"
storage = "sqlite:studies.db"
[server]
profile = "mine.toml"
model_id = "models/big/tiny.gguf"
[load]
file = "load.toml"
prompts_file = "prompts.jsonl"
input_tokens = "empirical:lengths.csv"
output_tokens = "uniform:8,16"
tokenizer = "tokenizer.json"
[param]
quantize = { type = "choice", values = ["none", { value = "gptq", model_id = "./gptq" }] }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a space file in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spaces").mkdir()
    return tmp_path / "spaces"


def test_every_path_is_relative_to_the_file(folder: Path) -> None:
    (folder / "space.toml").write_text(PATHS)
    (folder / "mine.toml").write_text("")

    found = read_space(Path("spaces/space.toml"))

    assert found["study"] == {"cost": "spaces/cost.json", "storage": "sqlite:spaces/studies.db"}
    assert found["server"] == {"profile": "spaces/mine.toml", "model_id": "./spaces/models/big/tiny.gguf"}
    assert found["load"] == {
        "file": "spaces/load.toml",
        "prompts_file": "spaces/prompts.jsonl",
        "input_tokens": "empirical:spaces/lengths.csv",
        "output_tokens": "uniform:8,16",
        "tokenizer": "./spaces/tokenizer.json",
    }
    assert found["param"]["quantize"]["values"] == ["none", {"value": "gptq", "model_id": "./spaces/gptq"}]


@pytest.mark.parametrize(
    "model", ["preset:tiny-llama", "org/model", "model", "s3://bucket/tiny.gguf", "/data/tiny.gguf"]
)
def test_a_preset_a_hub_id_and_an_absolute_path_do_not_change(folder: Path, model: str) -> None:
    (folder / "space.toml").write_text(f"[study]\nstorage = 'journal'\n[server]\nmodel_id = '{model}'\n")

    assert read_space(Path("spaces/space.toml")) == {"study": {"storage": "journal"}, "server": {"model_id": model}}


def test_a_name_is_a_path_if_it_is_beside_the_file(folder: Path) -> None:
    (folder / "org" / "model").mkdir(parents=True)
    (folder / "space.toml").write_text("[server]\nmodel_id = 'org/model'\n")

    assert read_space(Path("spaces/space.toml"))["server"]["model_id"] == "./spaces/org/model"


@pytest.mark.parametrize(
    "server",
    ["kind = 'tgi-docker'", "profile = 'vllm'\ncommand = 'docker run image --model {model}'", "profile = 'own.toml'"],
)
def test_the_model_of_a_server_in_a_container_is_not_a_path_here(folder: Path, server: str) -> None:
    profile = (PROFILES / "llamacpp.toml").read_text()
    boxed = profile.replace('command = "llama-server', 'command = "docker run --rm image llama-server')
    (folder / "own.toml").write_text(boxed)
    (folder / "space.toml").write_text(f"[server]\nmodel_id = './models/tiny'\n{server}\n")

    assert read_space(Path("spaces/space.toml"))["server"]["model_id"] == "./models/tiny"


@pytest.mark.parametrize(("place", "code"), [("spaces", 0), (".", 2)])
def test_check_looks_for_the_model_beside_the_space_file(
    folder: Path, capsys: pytest.CaptureFixture[str], place: str, code: int
) -> None:
    (folder.parent / place / "tiny.gguf").write_bytes(b"GGUF")
    (folder / "space.toml").write_text("[server]\nprofile = 'llamacpp'\nmodel_id = 'tiny.gguf'\n")

    assert cli.main(["check", "spaces/space.toml"]) == code

    assert ("relative to the space file" in capsys.readouterr().err) == bool(code)
