from pathlib import Path

import pytest

from reference_server.errors import UnsupportedError
from reference_server.launcher.model_facts import ModelFacts, read_model_config


def test_a_preset_has_a_config() -> None:
    content = read_model_config("preset:llama-3.1-8b")

    assert content is not None
    facts = ModelFacts.parse(content)
    assert (facts.hidden_size, facts.num_kv_heads, facts.head_dim) == (4096, 8, 128)


def test_a_preset_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="preset:tiny-llama"):
        read_model_config("preset:nonesuch")


def test_a_local_directory_has_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 7}')

    content = read_model_config(str(tmp_path))

    assert content is not None
    assert ModelFacts.parse(content).max_position_embeddings == 7


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_an_unreadable_config_is_unknown(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")

    assert read_model_config(str(tmp_path)) is None


def test_a_model_that_is_nowhere_is_unknown_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Port 9 of the loopback interface refuses.
    monkeypatch.setattr(
        "huggingface_hub.file_download.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/{revision}/{filename}",
    )

    assert read_model_config("nobody/nothing", cache=tmp_path) is None

    assert "Could not read the config.json of nobody/nothing: the hub cannot be reached" in caplog.text


def test_the_memory_of_a_model_that_does_not_fit_is_unknown() -> None:
    facts = ModelFacts(
        hidden_size=8, num_heads=2, num_kv_heads=2, num_layers=1, head_dim=4, intermediate_size=16, vocab_size=10
    )

    assert facts.weight_bytes is not None
    assert facts.tokens_that_fit(facts.weight_bytes - 1) is None
    assert facts.tokens_that_fit(facts.weight_bytes) == 0
