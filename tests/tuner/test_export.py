import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.config import ServerConfig
from tuner.export import render_toml, write_best


def test_a_setting_at_its_default_is_written_as_a_comment():
    text = render_toml({"port": 3000, "max_waiting_tokens": 7}, ["why"])

    assert text == "# why\n\n# port = 3000\nmax_waiting_tokens = 7\n"


def test_unset_settings_are_left_out(tmp_path):
    write_best(tmp_path / "best.toml", {"quantize": "none", "attention": "auto", "model_id": "preset:tiny-llama"}, [])

    assert tomllib.loads((tmp_path / "best.toml").read_text()) == {"model_id": "preset:tiny-llama"}


@given(st.text(min_size=1, alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_reads_back_as_it_was(text):
    assert tomllib.loads(render_toml({"model_id": text}, []))["model_id"] == text


@pytest.mark.parametrize(
    "settings", [{"cuda_memory_fraction": 0.83, "prefill_chunking": False, "cuda_graphs": [1, 2, 4]}]
)
def test_what_is_written_is_what_the_launcher_reads(settings):
    read = tomllib.loads(render_toml(settings, []))

    assert read == settings
    assert ServerConfig.model_validate(read).cuda_memory_fraction == 0.83
