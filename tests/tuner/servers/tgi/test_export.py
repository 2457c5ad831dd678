"""Exported settings: every format parses back to the same configuration."""

import json
import shlex
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server import settings
from reference_server.config import ServerConfig
from tuner.servers.exported_text import render_toml
from tuner.servers.tgi.export import DEFAULTS, render
from tuner.servers.tgi.settings import server_config
from tuner.study.best_file import tuned_by, write_best

CHOSEN = {
    "model_id": "preset:tiny-llama",
    "max_input_tokens": 1024,
    "max_total_tokens": 1056,
    "max_batch_prefill_tokens": 2048,
    "prefill_chunking": False,
    "max_waiting_tokens": 7,
    "cuda_memory_fraction": 0.85,
    "quantize": "fp8",
    "kv_cache_dtype": "auto",
}


@pytest.fixture
def served(monkeypatch):
    """The settings as the launcher parses them."""
    chosen = {name: value for name, value in CHOSEN.items() if value not in ("none", "auto")}
    launcher = {"otlp_service_name": "text-generation-inference.router", "waiting_served_ratio": 0.3}
    return ServerConfig.model_validate(chosen).model_dump() | launcher


def load(argv=(), environ=None):
    return settings.load(ServerConfig, list(argv), environ or {}).config.model_dump()


def variables(text):
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))


def test_tuning_6_toml_parses_back(tmp_path, served):
    path = tmp_path / "best.toml"
    path.write_text(render("toml", CHOSEN, ["found"]))

    assert load(["--config-file", str(path)]) | {"config_file": None} == served


def test_tuning_6_the_environment_parses_back(served):
    assert load(environ=variables(render("env", CHOSEN, ["found"]))) == served


def test_tuning_6_the_command_line_parses_back(served):
    assert load(shlex.split(render("cli", CHOSEN, []))[1:]) == served


def test_tuning_6_the_container_parses_back(served):
    words = shlex.split(render("docker", CHOSEN, ["it's found"], image="tgi:3").replace("\\\n", ""), comments=True)
    inside = words[words.index("tgi:3") + 1 :]
    environ = dict(words[index + 1].split("=", 1) for index, word in enumerate(words) if word == "-e")

    assert load(inside, environ) == served
    assert "127.0.0.1:8080:80" in words


def test_tuning_6_the_deployment_parses_back(served):
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all(render("k8s", CHOSEN, ["found"], image="tgi:3"))
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in container.get("env", [])}

    assert load(container["args"], environ) == served
    assert service["kind"] == "Service"


def test_settings_that_tgi_lacks_are_listed_and_left_out():
    text = render("docker", {**CHOSEN, "cpu_memory_gib": 0.5, "tuned_by": "s/1"}, [])

    assert "# TGI has no cpu_memory_gib" in text
    assert "--cpu-memory-gib" not in text


def test_the_server_reports_the_provenance():
    from reference_server.router.server_info import tuned_from

    text = tuned_by("s", 3, is_confirmed=True, gain=[1.1, 1.05, 1.15], metric="a and b, mean", load="open & 3/s")

    assert tuned_from(text) == {
        "study": "s",
        "trial": 3,
        "confirmed": True,
        "gain": {"metric": "a and b, mean", "ratio": 1.1, "lo": 1.05, "hi": 1.15},
        "load": "open & 3/s",
    }
    assert json.dumps(server_config({"model_id": "preset:tiny-llama", "tuned_by": text}).tuned_by)


def test_a_setting_at_its_default_is_commented_out():
    text = render_toml({"port": 3000, "max_waiting_tokens": 7}, DEFAULTS, ["why"])

    assert text == "# why\n\n# port = 3000\nmax_waiting_tokens = 7\n"


def test_unset_settings_are_left_out(tmp_path):
    write_best(tmp_path / "best.toml", {"quantize": "none", "attention": "auto", "model_id": "preset:tiny-llama"}, [])

    assert tomllib.loads((tmp_path / "best.toml").read_text()) == {"model_id": "preset:tiny-llama"}


@given(st.text(min_size=1, alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_reads_back_as_it_was(text):
    assert tomllib.loads(render_toml({"model_id": text}, {}, []))["model_id"] == text


@pytest.mark.parametrize(
    "settings", [{"cuda_memory_fraction": 0.83, "prefill_chunking": False, "cuda_graphs": [1, 2, 4]}]
)
def test_the_launcher_reads_the_written_settings(settings):
    read = tomllib.loads(render_toml(settings, {}, []))

    assert read == settings
    assert ServerConfig.model_validate(read).cuda_memory_fraction == 0.83
