"""Where the loader finds a model's files."""

from pathlib import Path

import pytest

from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from tests.support.samples.hub_cache import write_cached_model


def test_hardening_R9_the_loader_reads_the_configured_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = write_cached_model(tmp_path, "org/model", {"config.json": "{}"})

    paths = loader.locate(EngineOptions("org/model", hub_cache=tmp_path))

    assert (paths.directory, paths.is_from_hub) == (snapshot, True)
