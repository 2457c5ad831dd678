"""One rule finds a model's files for the launcher, the router, the download and the loader."""

import logging
from pathlib import Path

import pytest

from reference_server.errors import StartupError, UnsupportedError
from reference_server.launcher.model_facts import read_model_config
from reference_server.model_files import locate, locate_local
from reference_server.router.tokenizer_files import find_tokenizer_files
from tests.support.samples.hub_cache import write_cached_model


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_preset_and_a_directory_are_local(tmp_path: Path):
    preset, directory = locate_local("preset:llama-125m"), locate_local(str(tmp_path))

    assert preset is not None
    assert (preset.has_weights, preset.is_from_hub) == (False, False)
    assert directory is not None
    assert (directory.directory, directory.tokenizer_directory) == (tmp_path, tmp_path)
    assert locate_local("org/model") is None
    with pytest.raises(UnsupportedError):
        locate_local("preset:nonesuch")


def test_hardening_R9_a_directory_has_no_revisions_in_every_process(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    with caplog.at_level(logging.WARNING):
        files = find_tokenizer_files(str(tmp_path), "v2")

    assert files.config_directory == tmp_path
    assert f"`revision` v2 is ignored: {tmp_path} is not a model of the hub" in caplog.text
    assert read_model_config(str(tmp_path), "v2") == {"model_type": "llama"}


def test_hardening_R9_every_process_reads_the_configured_hub_cache(tmp_path: Path):
    snapshot = write_cached_model(tmp_path, "org/model", {"config.json": '{"model_type": "llama"}'})

    assert locate("org/model", None, tmp_path, ["*.json"]).directory == snapshot
    assert find_tokenizer_files("org/model", None, tmp_path).config_directory == snapshot
    assert read_model_config("org/model", None, tmp_path) == {"model_type": "llama"}


def test_a_model_that_is_nowhere_is_refused(tmp_path: Path):
    with pytest.raises(StartupError, match="model 'org/model' is not a preset, not a local directory, not in the hub"):
        locate("org/model", None, tmp_path, ["*.json"])


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "../nowhere/model"])
def test_hardening_R23_a_path_without_a_directory_is_not_sought_on_the_hub(path: str):
    with pytest.raises(StartupError, match=f"'{path}' is neither a directory nor the name of a model"):
        locate(path, None, None, ["*.json"])


def test_the_model_of_a_speculator_is_its_base_in_every_process(tmp_path: Path):
    base = write_cached_model(tmp_path, "org/model", {"config.json": '{"model_type": "llama"}'})
    heads = tmp_path / "heads"
    heads.mkdir()
    (heads / "config.json").write_text('{"medusa_num_heads": 3, "base_model_name_or_path": "org/model"}')

    paths = locate(str(heads), None, tmp_path, ["*.json"])

    assert (paths.directory, paths.tokenizer_directory, paths.speculator) == (base, base, heads)
    assert find_tokenizer_files(str(heads), None, tmp_path).config_directory == base
    assert read_model_config(str(heads), None, tmp_path) == {"model_type": "llama"}


def test_a_speculator_of_a_preset_is_a_preset():
    paths = locate("preset:tiny-llama-medusa", None, None, ["*.json"])

    assert paths.directory == locate("preset:tiny-llama", None, None, ["*.json"]).directory
    assert paths.speculator is not None
    assert paths.speculator.name == "tiny-llama-medusa"


@pytest.mark.parametrize("base", ["", "null", "3"])
def test_a_speculator_that_names_no_base_model_is_refused(tmp_path: Path, base: str):
    (tmp_path / "config.json").write_text(f'{{"model_type": "mlp_speculator", "base_model_name_or_path": {base or 0}}}')

    with pytest.raises(StartupError, match="a speculator names its base model in `base_model_name_or_path`"):
        locate(str(tmp_path), None, None, ["*.json"])


def test_a_speculator_of_a_speculator_is_refused(tmp_path: Path):
    for name, base in (("one", "two"), ("two", "three")):
        (tmp_path / name).mkdir()
        config = f'{{"model_type": "mlp_speculator", "base_model_name_or_path": "{tmp_path / base}"}}'
        (tmp_path / name / "config.json").write_text(config)

    with pytest.raises(UnsupportedError, match="which is a speculator too"):
        locate(str(tmp_path / "one"), None, None, ["*.json"])
