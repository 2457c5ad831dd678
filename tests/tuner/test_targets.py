import json
import os
from pathlib import Path

import pytest

from loadgen.errors import UsageError
from tuner.config import ServerSection
from tuner.device_lock import device_lock
from tuner.errors import DeviceBusyError, StudyError
from tuner.run_lock import run_lock
from tuner.space import server_config
from tuner.storage import open_storage, redacted
from tuner.targets import docker_command, launch_of, remove_container

CONFIG = server_config({"model_id": "m", "max_batch_prefill_tokens": 512, "prefill_chunking": False})


def test_our_launcher_gets_the_configuration_as_flags(tmp_path):
    launch = launch_of(ServerSection(gpus=(1, 3)), CONFIG, tmp_path)

    assert Path(launch.command[0]).name == "text-generation-launcher"
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_a_tgi_container_is_published_on_this_machine_only_and_known_by_its_id(tmp_path):
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


def test_what_a_tgi_does_not_have_is_refused_by_name(tmp_path):
    config = server_config({"model_id": "m", "cpu_memory_gib": 1.0})

    with pytest.raises(UsageError, match="`cpu_memory_gib`"):
        launch_of(ServerSection(kind="tgi-launcher", command="launcher"), config, tmp_path)


def test_a_command_gets_settings_in_its_words_and_in_its_environment(tmp_path):
    server = ServerSection(kind="command", command="serve --budget {max_batch_prefill_tokens} --port {port}")
    launch = launch_of(server, CONFIG, tmp_path)

    assert launch.command == ("serve", "--budget", "512", "--port", "{port}")
    assert launch.environment["PREFILL_CHUNKING"] == "false"
    with pytest.raises(UsageError, match="no_such"):
        launch_of(ServerSection(kind="command", command="serve {no_such}"), CONFIG, tmp_path)


def test_a_device_is_held_by_one_and_the_other_is_told_by_whom(tmp_path):
    said = []

    with device_lock((0,), said.append, folder=tmp_path), pytest.raises(DeviceBusyError, match=str(os.getpid())):  # noqa: SIM117
        with device_lock((0,), said.append, wait_s=0.0, folder=tmp_path):
            pass
    with device_lock((0,), said.append, wait_s=0.0, folder=tmp_path):
        assert json.loads((tmp_path / "gpu0.lock").read_text())["pid"] == os.getpid()


def test_a_study_has_one_run_at_a_time(tmp_path):
    with run_lock(tmp_path), pytest.raises(StudyError, match="tgi-tune worker"), run_lock(tmp_path):
        pass


@pytest.mark.parametrize("text", ["mongodb://x", "grpc://nowhere", "file"])
def test_a_storage_that_is_none_is_refused(tmp_path, text):
    with pytest.raises(StudyError, match="grpc://HOST:PORT"):
        open_storage(text, tmp_path)


def test_a_password_is_not_shown():
    assert redacted("postgresql://me:secret@db/studies") == "postgresql://me:***@db/studies"
    assert redacted("sqlite:studies.db") == "sqlite:studies.db"
