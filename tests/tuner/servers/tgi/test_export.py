"""Exported settings: every format parses back to the same configuration."""

import json
import shlex
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.configuration import settings
from reference_server.configuration.config import ServerConfig
from tuner.errors import SpaceError
from tuner.servers.exported_text import image_note, render_toml
from tuner.servers.tgi.export import DEFAULTS, render
from tuner.servers.tgi.settings import server_config
from tuner.study.best_file import tuned_by, write_best

CHOSEN = {
    "model_id": "org/model",
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


def test_tuning_6_the_compose_file_parses_back(served):
    yaml = pytest.importorskip("yaml")
    [service] = yaml.safe_load(render("compose", CHOSEN, ["found"], image="tgi:3"))["services"].values()

    assert load(service["command"], service.get("environment", {})) == served
    assert (service["image"], service["ports"]) == ("tgi:3", ["127.0.0.1:8080:80"])
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_a_compose_file_keeps_dollars_and_has_no_gpus_after_a_study_without_them():
    yaml = pytest.importorskip("yaml")
    text = render("compose", {**CHOSEN, "revision": "$HF_TOKEN"}, [], image="tgi:3", has_gpus=False)
    [service] = yaml.safe_load(text)["services"].values()

    assert "$$HF_TOKEN" in service["command"]
    assert "deploy" not in service


def test_the_deployment_has_probes_and_time_to_finish_its_requests():
    yaml = pytest.importorskip("yaml")
    deployment, _ = yaml.safe_load_all(render("k8s", CHOSEN, [], image="tgi:3"))
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]

    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {name: each["httpGet"] for name, each in probes.items()} == {
        name: {"path": "/health", "port": 80} for name in probes
    }
    # A model of minutes is loaded before the liveness probe may restart the pod.
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] == 1800
    # The launcher waits 90 s for its requests.
    assert pod["terminationGracePeriodSeconds"] > 90 + 5
    assert container["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "5"]}}}


def test_settings_that_tgi_lacks_are_listed_and_left_out():
    text = render("docker", {**CHOSEN, "cpu_memory_gib": 0.5, "tuned_by": "s/1"}, [])

    assert "# Left out, because TGI does not have it: cpu_memory_gib" in text
    assert "--cpu-memory-gib" not in text


def test_a_value_that_tgi_lacks_is_listed_and_left_out():
    text = render("docker", {**CHOSEN, "quantize": "int4"}, [])

    assert "# Left out, because TGI does not have it: quantize int4\n" in text
    assert "--quantize" not in text


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


HOSTILE = "found\nrm -rf x\r\x1b[2J\u2028echo"


@pytest.mark.parametrize("form", ["toml", "env", "docker", "compose", "k8s"])
def test_hardening_S5_a_comment_stays_a_comment(form):
    plain, hostile = (render(form, CHOSEN, [each]).splitlines() for each in ("found", HOSTILE))

    assert len(plain) == len(hostile)
    assert [line for line in plain if not line.startswith("#")] == [
        line for line in hostile if not line.startswith("#")
    ]


@pytest.mark.parametrize("form", ["toml", "env", "cli", "docker", "compose", "k8s"])
@pytest.mark.parametrize("value", ["a\nHF_TOKEN=x", "a\rb", "a\x00", "a\x1b[2J"])
def test_hardening_S5_a_setting_with_control_characters_is_refused(form, value):
    with pytest.raises(SpaceError, match="control characters cannot be exported"):
        render(form, {**CHOSEN, "revision": value}, [])


def test_hardening_S5_kubernetes_replaces_no_variable_in_a_setting():
    yaml = pytest.importorskip("yaml")
    deployment, _ = yaml.safe_load_all(render("k8s", {**CHOSEN, "revision": "$(HF_TOKEN)"}, [], image="tgi:3"))

    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    words = [*container["args"], *(each["value"] for each in container.get("env", []))]
    assert [word for word in words if "HF_TOKEN" in word] == ["$$(HF_TOKEN)"]


@pytest.mark.parametrize("form", ["docker", "compose", "k8s"])
def test_hardening_S6_a_preset_is_not_exported_to_tgi(form):
    with pytest.raises(SpaceError, match="a preset of this package"):
        render(form, {**CHOSEN, "model_id": "preset:tiny-llama"}, [])


@pytest.mark.parametrize("form", ["docker", "compose", "k8s"])
def test_hardening_S6_an_export_states_its_assumptions(form):
    text = render(form, CHOSEN, [], image="ghcr.io/x/tgi:latest", has_gpus=False)

    assert "gpu:" not in text
    assert "--gpus" not in text
    assert "# The study used no GPU" in text
    assert "# Uses the newest ghcr.io/x/tgi:latest: pin its version or digest." in text
    assert "# Limits from the study's load; raise them for longer requests: max_input_tokens 1024, max_total" in text


@pytest.mark.parametrize("image", ["tgi:3.3.5", "host:5000/tgi@sha256:00ff", "host:5000/x/tgi:3"])
def test_hardening_S6_a_pinned_image_is_not_noted(image):
    assert image_note(image) == []
    assert image_note("host:5000/tgi") != []
