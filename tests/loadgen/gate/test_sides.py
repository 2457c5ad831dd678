"""Sides are parsed from a command line, and their servers are opened."""

import subprocess
from contextlib import ExitStack

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import MeasurementError, StartError, UsageError
from loadgen.gate.sides import CommandServer, ImageServer, LiveSide, open_side, planned_words, read_side
from loadgen.progress import SilentProgress
from tests.support.servers.programs import fake_docker

LOAD = BenchConfig(requests=1, ready_timeout="20s")


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("http://host:80/base", "url", "http://host:80/base"),
        ("git:main", "git", "main"),
        ("git:v1.0:deploy/server.toml", "git", "v1.0:deploy/server.toml"),
        ("image:registry.example/tgi:1.2", "image", "registry.example/tgi:1.2"),
        ("command:serve --port {port}", "command", "serve --port {port}"),
        ("baseline:main", "baseline", "main"),
        ("best.toml", "config", "best.toml"),
        (".", "stored", "."),
    ],
)
def test_the_kind_of_a_side_follows_from_its_text(text, kind, name):
    side = read_side("a", text, None)

    assert (side.kind, side.name) == (kind, name)


@pytest.mark.parametrize("text", ["main", "nowhere", "git:", "server.yaml", ""])
def test_a_text_that_is_not_a_side_is_refused_with_the_possible_forms(text):
    with pytest.raises(
        UsageError, match=r"is not a side of a comparison; a side is a URL, a server's TOML file, git:REV"
    ):
        read_side("a", text, None)


def test_added_arguments_are_refused_without_a_launcher_and_with_a_port():
    with pytest.raises(UsageError, match="`args-b` is given but side B is 'http://h', which accepts no arguments"):
        read_side("b", "http://h", None, "--max-batch-size 4")
    with pytest.raises(UsageError, match="sets --port"):
        read_side("a", "git:HEAD", None, "--port=80")


def test_labels_show_added_arguments_without_secrets():
    side = read_side("b", "git:HEAD", None, "--api-key hush --max-batch-size 4")

    assert side.label == "HEAD --api-key *** --max-batch-size 4"
    assert read_side("a", "command:serve --api-key hush", None).label == "A"


def test_a_toml_file_is_passed_to_the_launcher_and_identified_by_its_digest(tmp_path):
    (tmp_path / "server.toml").write_text('model_id = "preset:tiny-llama"\n')
    text = read_side("a", "server.toml", None, "--max-batch-size 4")

    with ExitStack() as held:
        side = open_side(text, LOAD, tmp_path, held, SilentProgress())

    assert list(side.server.words[1:]) == ["--config-file", str(tmp_path / "server.toml"), "--max-batch-size", "4"]
    assert side.identity["config"] == "server.toml"
    assert len(side.identity["config_digest"]) == 64


def test_a_missing_toml_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"absent\.toml: No such file"):
        planned_words(read_side("a", "absent.toml", None), LOAD)


def test_a_file_is_read_as_it_was_in_the_revision(tmp_path):
    (tmp_path / "out").mkdir()
    for words in (["init", "-q"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]):
        subprocess.run(["git", *words], check=True)
    for content in ("max_batch_size = 1\n", "max_batch_size = 2\n"):
        (tmp_path / "server.toml").write_text(content)
        subprocess.run(["git", "add", "server.toml"], check=True)
        subprocess.run(["git", "commit", "-q", "-m", content], check=True)

    with ExitStack() as held:
        side = open_side(read_side("a", "git:HEAD~1:server.toml", None), LOAD, tmp_path / "out", held, SilentProgress())

    assert (tmp_path / "out/a-server.toml").read_text() == "max_batch_size = 1\n"
    assert side.server.words[2] == str(tmp_path / "out/a-server.toml")
    assert len(side.identity["commit"]) == 40


def test_an_image_is_published_on_loopback_and_its_container_is_removed_by_its_id(tmp_path, monkeypatch):
    for name, value in fake_docker.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    text = read_side("a", "image:tgi:1", None, "--max-batch-size 4")

    with ExitStack() as held:
        side = open_side(text, LOAD, tmp_path, held, SilentProgress())
        with side.server.open(LOAD, tmp_path / "run" / "server.log") as target:
            assert target.info()["model_id"]
            port = target.url.rpartition(":")[2]

    inspected, started, removed = fake_docker.notes(tmp_path)
    assert inspected[:2] == ["image", "inspect"]
    assert side.identity == {"image": "tgi:1", "image_digest": "sha256:0123"}
    assert started[:2] == ["run", "--rm"]
    assert f"127.0.0.1:{port}:{port}" in started
    assert started[-5:] == ["tgi:1", "--model-id", "preset:tiny-llama", "--max-batch-size", "4"]
    assert removed == ["rm", "--force", "c0ffee"]


def test_without_docker_an_image_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(MeasurementError, match="docker is not installed"), ExitStack() as held:
        open_side(read_side("a", "image:tgi:1", None), LOAD, tmp_path, held, SilentProgress())


def test_a_command_that_ends_is_a_start_error(tmp_path):
    side = LiveSide("a", "A", CommandServer(("false",)))

    with pytest.raises(StartError, match="ended with exit code 1"), side.server.open(LOAD, tmp_path / "server.log"):
        pass


def test_words_for_docker_come_before_the_image_and_reach_no_other_side(tmp_path):
    image, command = (
        read_side(letter, text, None, None, "--gpus all --shm-size 1g")
        for letter, text in (("a", "image:tgi:1"), ("b", "command:serve it"))
    )

    assert planned_words(command, LOAD) == ["serve", "it"]
    assert image.docker_arguments == ("--gpus", "all", "--shm-size", "1g")
    words = ImageServer(image.name, ("--model-id", "m"), image.docker_arguments).words
    assert words[-7:] == ("--gpus", "all", "--shm-size", "1g", "tgi:1", "--model-id", "m")
