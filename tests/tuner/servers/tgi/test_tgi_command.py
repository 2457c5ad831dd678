import os
from pathlib import Path

import pytest

from loadgen.errors import UsageError
from tuner.config import ServerSection
from tuner.servers.launch_command import remove_container
from tuner.servers.tgi.settings import server_config
from tuner.servers.tgi.tgi_command import docker_command, launch_command_of, tgi_words

CONFIG = server_config({"model_id": "m", "max_batch_prefill_tokens": 512, "prefill_chunking": False})


def test_the_bundled_launcher_gets_the_configuration_as_flags(tmp_path):
    launch = launch_command_of(ServerSection(gpus=(1, 3)), CONFIG, tmp_path)

    assert Path(launch.command[0]).name == "text-generation-launcher"
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_a_tgi_container_is_published_on_loopback_and_identified_by_its_id(tmp_path):
    server = ServerSection(kind="tgi-docker", image="tgi:3", gpus=(0,), volume="/data:/data")
    words = docker_command(server, CONFIG, tmp_path / "id")

    assert words[words.index("-p") + 1] == "127.0.0.1:{port}:80"
    assert words[words.index("--cidfile") + 1] == str(tmp_path / "id")
    assert sorted(words[words.index("tgi:3") + 1 :]) == ["--max-batch-prefill-tokens", "--model-id", "512", "m"]
    assert "PREFILL_CHUNKING=false" in words


def test_a_container_is_removed_by_its_id(tmp_path, monkeypatch):
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    (tmp_path / "id").write_text("abc123\n")

    remove_container(tmp_path / "id")
    remove_container(tmp_path / "id")

    assert (tmp_path / "calls").read_text() == "rm -f abc123\n"


def test_a_setting_that_tgi_lacks_is_refused_by_name(tmp_path):
    config = server_config({"model_id": "m", "cpu_memory_gib": 1.0})

    with pytest.raises(UsageError, match="`cpu_memory_gib`"):
        launch_command_of(ServerSection(kind="tgi-launcher", command="launcher"), config, tmp_path)


def test_a_command_gets_settings_as_words_and_as_environment_variables(tmp_path):
    server = ServerSection(kind="command", command="serve --budget {max_batch_prefill_tokens} --port {port}")
    launch = launch_command_of(server, CONFIG, tmp_path)

    assert launch.command == ("serve", "--budget", "512", "--port", "{port}")
    assert launch.environment["PREFILL_CHUNKING"] == "false"
    with pytest.raises(UsageError, match="no_such"):
        launch_command_of(ServerSection(kind="command", command="serve {no_such}"), CONFIG, tmp_path)


@pytest.mark.parametrize(
    "setting",
    [
        {"compiled_walk": False},
        {"quantize": "int4"},
        {"auth_all_routes": True},
        {"max_requests_per_client": 4},
        {"step_timeout": 5},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_that_tgi_does_not_have_is_refused_by_name(setting):
    with pytest.raises(UsageError, match=f"TGI has no `{next(iter(setting))}`"):
        tgi_words(server_config({"model_id": "m", **setting}))
