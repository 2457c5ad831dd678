"""The files that the loader reads, and the settings in them that it does not apply."""

import json
import logging
from pathlib import Path

import pytest

from reference_server.errors import UnsupportedError
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from tests.support.models.tiny_models import save_tiny_model
from tests.support.models.tiny_shards import tiny_options
from tests.support.samples.hub_cache import write_cached_model


def test_hardening_R9_the_loader_reads_the_configured_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = write_cached_model(tmp_path, "org/model", {"config.json": "{}"})

    paths = loader.locate(EngineOptions("org/model", hub_cache=tmp_path))

    assert (paths.directory, paths.is_from_hub) == (snapshot, True)


def test_hardening_R17_settings_of_the_files_that_are_not_applied_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = tiny_options(save_tiny_model(tmp_path, "llama"))
    settings = {"repetition_penalty": 1.1, "suppress_tokens": [3], "forced_bos_token_id": 2, "num_beams": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "no_repeat_ngram_size": 0}))

    with caplog.at_level(logging.WARNING):
        loader.load(options, loader.locate(options), RankGroup(0, 1))

    named = [message.split("`")[1] for message in caplog.messages if "is not applied" in message]
    assert named == ["repetition_penalty: 1.1", "suppress_tokens: [3]", "forced_bos_token_id: 2"]


def test_hardening_R17_a_model_whose_tokens_attend_to_later_ones_is_refused(tmp_path: Path) -> None:
    options = tiny_options(save_tiny_model(tmp_path, "llama", is_causal=False))

    with pytest.raises(UnsupportedError, match="has `is_causal: false`: its tokens attend to later ones"):
        loader.load(options, loader.locate(options), RankGroup(0, 1))
