"""The weights of a model are found in a directory or the cache, or fetched from a hub over HTTP."""

import doctest
import errno
import json
import logging
import time
from collections import namedtuple
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save

from reference_server.errors import StartupError, UnsupportedError
from reference_server.model_server.weights import download, files, resume
from reference_server.model_server.weights.download import Downloader, Weights
from reference_server.model_server.weights.hub import HuggingFaceHub
from tests.support.models.tiny_models import save_tiny_model
from tests.support.servers.hub import Fault, etag_of, fake_hub

TOKEN = "hf_private_1234567890"
# Large enough to be a large file of the hub, with a SHA-256 of its own.
WEIGHTS = save({"w": torch.arange(4096.0)}, {"format": "pt"})
SMALL = {"config.json": b"{}", "tokenizer.json": b'{"model": {}}'}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MODEL = {**SMALL, "README.md": b"text", "model.safetensors": WEIGHTS}


@pytest.fixture
def hub():
    with fake_hub() as hub:
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def small_pieces(monkeypatch):
    """A download is written in pieces of 1,000 bytes, which are 10 MB otherwise."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)


@pytest.fixture
def offline(monkeypatch):
    """A function that makes the network unreachable."""
    return lambda: monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def downloader(hub, cache, token=None, pauses=None):
    pauses = [] if pauses is None else pauses
    return Downloader(HuggingFaceHub(token, cache, hub.url), pauses.append)


def fetched(hub):
    """Files of which bytes were asked for."""
    return [path.rpartition("/")[2] for verb, path, _ in hub.requests if verb == "GET" and "/resolve/" in path]


def pickled(tmp_path, **tensors) -> bytes:
    torch.save(tensors, tmp_path / "pickle")
    return (tmp_path / "pickle").read_bytes()


def test_missing_files_are_fetched_with_every_file_that_serving_needs(hub, cache):
    hub.add("some/model", {**MODEL, "training_args.safetensors": b"", "onnx/model.safetensors": b""})

    directory = downloader(hub, cache).ensure(Weights("some/model"))

    assert fetched(hub) == ["config.json", "tokenizer.json", "model.safetensors"]
    assert load_file(directory / "model.safetensors")["w"].tolist() == list(range(4096))


def test_safetensors_come_before_pickles(hub, cache):
    hub.add("some/model", {**MODEL, "pytorch_model.bin": b"pickle"})

    directory = downloader(hub, cache).ensure(Weights("some/model"))

    assert not (directory / "pytorch_model.bin").exists()


def test_another_extension_is_fetched_as_it_is(hub, cache, tmp_path):
    hub.add("some/model", {**MODEL, "pytorch_model.bin": pickled(tmp_path, w=torch.ones(2))})

    directory = downloader(hub, cache).ensure(Weights("some/model", extension=".bin"))

    assert (directory / "pytorch_model.bin").is_file()
    assert not (directory / "model.safetensors").exists()


def test_files_in_the_cache_are_not_fetched_again(hub, cache, caplog):
    hub.add("some/model", MODEL)
    downloader(hub, cache).ensure(Weights("some/model"))
    hub.requests.clear()
    caplog.set_level(logging.INFO)

    downloader(hub, cache).ensure(Weights("some/model"))

    assert fetched(hub) == []
    assert "Files are already present on the host. Skipping download." in caplog.text


def test_a_revision_is_a_branch_or_a_commit_and_never_another_one(hub, cache):
    first = hub.add("some/model", {"model.safetensors": b"first"})
    hub.add("some/model", {"model.safetensors": b"second"}, revision="v2")

    by_branch = downloader(hub, cache).ensure(Weights("some/model", revision="v2"))
    by_commit = downloader(hub, cache).ensure(Weights("some/model", revision=first))

    assert (by_branch / "model.safetensors").read_bytes() == b"second"
    assert (by_commit / "model.safetensors").read_bytes() == b"first"
    with pytest.raises(StartupError, match="model 'some/model' has no revision 'v3'"):
        downloader(hub, cache).ensure(Weights("some/model", revision="v3"))


def test_all_files_are_of_one_commit_though_the_branch_moves_on(hub, cache, monkeypatch):
    hub.add("some/model", {SHARDS[0]: b"old 1", SHARDS[1]: b"old 2"})
    fetch = HuggingFaceHub.fetch

    def fetch_and_move_on(self, snapshot, name):
        hub.add("some/model", {SHARDS[0]: b"new 1", SHARDS[1]: b"new 2"})
        return fetch(self, snapshot, name)

    monkeypatch.setattr(HuggingFaceHub, "fetch", fetch_and_move_on)
    directory = downloader(hub, cache).ensure(Weights("some/model"))

    assert [(directory / name).read_bytes() for name in SHARDS] == [b"old 1", b"old 2"]


def test_reliability_F34_a_cut_download_goes_on_where_it_stopped(hub, cache, small_pieces):
    hub.add("some/model", MODEL)
    hub.faults["model.safetensors"] = [Fault(break_after=10_000)]

    directory = downloader(hub, cache).ensure(Weights("some/model"))

    assert hub.asked("GET", "model.safetensors") == [None, "bytes=10000-"]
    assert hub.bytes_sent["model.safetensors"] == len(WEIGHTS)
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


def test_reliability_F34_files_of_an_ended_process_are_not_fetched_twice(hub, cache, small_pieces):
    """The connection breaks, five retries are refused, and a later process continues at the same byte."""
    hub.add("some/model", MODEL)
    hub.faults["model.safetensors"] = [Fault(break_after=10_000), *[Fault(status=500)] * 5]
    with pytest.raises(StartupError, match=r"could not download model\.safetensors of some/model"):
        downloader(hub, cache).ensure(Weights("some/model"))
    left = [path.name for path in cache.rglob("blobs/*.incomplete")]

    directory = downloader(hub, cache).ensure(Weights("some/model"))

    assert left == [f"{etag_of(WEIGHTS)}.incomplete"]
    assert hub.bytes_sent["model.safetensors"] == len(WEIGHTS)
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert list(cache.rglob("*.incomplete")) == []


def test_reliability_F34_a_file_is_tried_five_times_five_seconds_apart(hub, cache):
    hub.add("some/model", MODEL)
    hub.faults["model.safetensors"] = [Fault(status=503)] * 4
    pauses = []

    downloader(hub, cache, pauses=pauses).ensure(Weights("some/model"))

    assert len(hub.asked("GET", "model.safetensors")) == 5
    assert pauses == [5.0] * 4


@pytest.mark.parametrize("status", [429, 500, 503])
def test_reliability_F34_a_hub_that_is_busy_is_asked_again(hub, cache, status):
    hub.add("some/model", MODEL)
    hub.faults["info"] = [Fault(status=status)] * 4
    pauses = []

    directory = downloader(hub, cache, pauses=pauses).ensure(Weights("some/model"))

    assert (directory / "model.safetensors").is_file()
    assert pauses == [5.0] * 4


def test_reliability_F34_bytes_with_another_digest_are_not_kept(hub, cache):
    hub.add("some/model", MODEL)
    hub.faults["model.safetensors"] = [Fault(wrong=True)] * 5

    with pytest.raises(StartupError, match=f"its digest is not {etag_of(WEIGHTS)}"):
        downloader(hub, cache).ensure(Weights("some/model"))

    assert [path.stat().st_size for path in cache.rglob(f"{etag_of(WEIGHTS)}*") if path.parent.name == "blobs"] == [0]


@pytest.mark.parametrize("given", [None, "hf_of_somebody_else"])
def test_reliability_F34_a_private_model_is_asked_for_once_and_the_message_names_the_variable(
    hub, cache, given, caplog
):
    hub.add("some/private", MODEL, token=TOKEN)
    pauses = []

    with pytest.raises(StartupError, match="HF_TOKEN") as raised:
        downloader(hub, cache, given, pauses).ensure(Weights("some/private"))

    assert "some/private" in str(raised.value)
    assert pauses == []
    assert str(given) not in str(raised.value) + caplog.text


def test_a_private_model_is_fetched_with_its_token(hub, cache):
    hub.add("some/private", MODEL, token=TOKEN)

    directory = downloader(hub, cache, TOKEN).ensure(Weights("some/private"))

    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_that_lies_elsewhere_is_fetched_without_telling_the_token(hub, cache, small_pieces):
    hub.add("some/private", MODEL, token=TOKEN)
    hub.has_storage = True
    hub.faults["model.safetensors"] = [Fault(break_after=10_000)]

    directory = downloader(hub, cache, TOKEN).ensure(Weights("some/private"))

    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    stored = [wanted for _, path, wanted in hub.requests if path.startswith("/storage/") and path.endswith("rs")]
    assert stored == [None, "bytes=10000-"]


def test_a_name_that_no_hub_can_have_is_refused(hub, cache):
    with pytest.raises(StartupError, match=r"'\.\./model' is neither a directory nor the name of a model"):
        downloader(hub, cache).ensure(Weights("../model"))


def test_a_cache_that_cannot_be_written_is_named(hub, tmp_path):
    hub.add("some/model", MODEL)
    (tmp_path / "file").touch()

    with pytest.raises(StartupError, match=r"cannot be written to the hub cache .*/file/cache"):
        downloader(hub, tmp_path / "file" / "cache").ensure(Weights("some/model"))


def test_a_file_that_does_not_fit_on_the_disk_is_not_begun(hub, cache, monkeypatch):
    hub.add("some/model", MODEL)
    monkeypatch.setattr(resume.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(1000))

    with pytest.raises(StartupError, match=f"{len(WEIGHTS)} bytes are to be downloaded, and .* has 1000 bytes free"):
        downloader(hub, cache).ensure(Weights("some/model"))
    assert hub.asked("GET", "model.safetensors") == []


def test_a_disk_that_fills_up_meanwhile_ends_the_download(hub, cache, monkeypatch):
    hub.add("some/model", MODEL)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    pauses = []

    with pytest.raises(StartupError, match=r"cannot be written to the hub cache .*: No space left on device"):
        downloader(hub, cache, pauses=pauses).ensure(Weights("some/model"))
    assert pauses == []


def test_a_hub_that_cannot_be_reached_leaves_the_cache(hub, cache, caplog):
    hub.add("some/model", MODEL)
    downloader(hub, cache).ensure(Weights("some/model"))
    hub.url = "http://127.0.0.1:9"

    directory = downloader(hub, cache).ensure(Weights("some/model"))

    assert (directory / "model.safetensors").is_file()
    assert "The hub does not answer, looking in the cache" in caplog.text


def test_model_server_M32_offline_the_cached_snapshot_is_enough(hub, cache, offline):
    hub.add("some/model", MODEL, revision="v1")
    online = downloader(hub, cache).ensure(Weights("some/model", revision="v1"))
    hub.requests.clear()
    offline()

    assert downloader(hub, cache).ensure(Weights("some/model", revision="v1")) == online
    assert hub.requests == []


@pytest.mark.parametrize("wanted", [Weights("other/model"), Weights("some/model", revision="v2")])
def test_model_server_M32_offline_and_not_cached_fails(hub, cache, offline, wanted):
    hub.add("some/model", MODEL)
    downloader(hub, cache).ensure(Weights("some/model"))
    offline()

    with pytest.raises(
        StartupError,
        match=rf"{wanted.model_id!r} at revision {wanted.revision or 'main'} is not in the cache.*download-weights",
    ):
        downloader(hub, cache).ensure(wanted)


def test_offline_names_the_shard_that_is_missing(hub, cache, offline):
    hub.add("some/model", {SHARDS[0]: b"1", SHARDS[1]: b"2"})
    directory = downloader(hub, cache).ensure(Weights("some/model"))
    (directory / SHARDS[1]).unlink()
    offline()

    with pytest.raises(StartupError, match=f"has {SHARDS[0]} without {SHARDS[1]} in the cache"):
        downloader(hub, cache).ensure(Weights("some/model"))


def test_model_that_the_hub_does_not_know_is_an_error(hub, cache):
    with pytest.raises(StartupError, match="model 'some/model' does not exist or needs a token: the hub answers 401"):
        downloader(hub, cache).ensure(Weights("some/model"))


def test_a_repository_without_weights_is_an_error(hub, cache):
    hub.add("some/model", SMALL)

    with pytest.raises(StartupError, match=r"model some/model has no \.safetensors weights on the hub"):
        downloader(hub, cache).ensure(Weights("some/model"))


def test_pickled_weights_of_the_hub_are_converted_once(hub, cache, tmp_path, offline):
    contents = {f"pytorch_model-0000{n}-of-00002.bin": pickled(tmp_path, **{f"w{n}": torch.ones(n)}) for n in (1, 2)}
    index = {"weight_map": {f"w{n}": name for n, name in enumerate(contents, start=1)}}
    hub.add("some/model", {**contents, "pytorch_model.bin.index.json": json.dumps(index).encode()})

    directory = downloader(hub, cache).ensure(Weights("some/model"))
    hub.requests.clear()
    downloader(hub, cache).ensure(Weights("some/model"))
    offline()
    downloader(hub, cache).ensure(Weights("some/model"))

    assert fetched(hub) == []
    assert [load_file(directory / name)[f"w{n}"].tolist() for n, name in enumerate(SHARDS, 1)] == [[1.0], [1.0, 1.0]]
    written = json.loads((directory / "model.safetensors.index.json").read_text())
    assert written["weight_map"] == {"w1": SHARDS[0], "w2": SHARDS[1]}


def test_pickles_of_the_hub_are_refused_if_conversion_is_off(hub, cache):
    hub.add("some/model", {"pytorch_model.bin": b"pickle"})

    with pytest.raises(StartupError, match=r"has no \.safetensors weights"):
        downloader(hub, cache).ensure(Weights("some/model", auto_convert=False))
    assert fetched(hub) == []


@pytest.mark.parametrize("name", ["../outside.bin", "/outside.bin", "missing.bin"])
def test_reliability_T22_an_index_of_the_hub_names_plain_files_that_are_there(hub, cache, name):
    index = json.dumps({"weight_map": {"w": name}}).encode()
    hub.add("some/model", {"pytorch_model.bin.index.json": index, "pytorch_model-1.bin": b""})

    with pytest.raises(StartupError, match=f"names .*{name}"):
        downloader(hub, cache).ensure(Weights("some/model"))


def test_the_model_that_a_config_builds_upon_is_fetched_too(hub, cache, caplog):
    hub.add("some/head", {"config.json": b'{"base_model_name_or_path": "some/model"}', "medusa.safetensors": b"head"})
    hub.add("some/model", {"config.json": b'{"base_model_name_or_path": "some/head"}', "model.safetensors": b"body"})

    downloader(hub, cache).ensure(Weights("some/head"))

    assert "medusa.safetensors" in fetched(hub)
    assert "model.safetensors" in fetched(hub)


MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"}
MLP = {"model_type": "mlp_speculator", "n_predict": 3, "base_model_name_or_path": "some/model"}


@pytest.mark.parametrize(("config", "file"), [(MEDUSA, "medusa_lm_head.safetensors"), (MLP, "model.safetensors")])
def test_a_speculator_is_downloaded_with_its_base_model(hub, cache, config, file):
    hub.add("some/heads", {"config.json": json.dumps(config).encode(), file: b"heads"})
    hub.add("some/model", {"config.json": b"{}", **MODEL})

    directory = downloader(hub, cache).ensure(Weights("some/heads"))

    assert (directory / file).read_bytes() == b"heads"
    assert fetched(hub).count("model.safetensors") == 1 + (file == "model.safetensors")


def test_a_speculator_on_this_machine_is_completed_by_its_base_model_of_the_hub(hub, cache, tmp_path):
    hub.add("some/model", {"config.json": b"{}", **MODEL})
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA))
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"heads")

    assert downloader(hub, cache).ensure(Weights(str(tmp_path))) == tmp_path
    assert "model.safetensors" in fetched(hub)


def test_a_speculator_without_its_base_model_is_an_error(hub, cache, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MEDUSA, "base_model_name_or_path": "missing/model"}))
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"heads")

    with pytest.raises(StartupError, match="missing/model"):
        downloader(hub, cache).ensure(Weights(str(tmp_path)))


@pytest.mark.parametrize("parent", ["nobody/nothing", "/somewhere/else"])
def test_a_missing_parent_is_no_failure(hub, cache, parent):
    hub.add("some/head", {"config.json": json.dumps({"base_model_name_or_path": parent}).encode(), **MODEL})

    directory = downloader(hub, cache).ensure(Weights("some/head"))

    assert (directory / "model.safetensors").is_file()


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """Makes the files of an adapter of a base model, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)

    def make(base_model_id):
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": base_model_id}
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        factors = {name.format("A"): torch.ones(2, 48), name.format("B"): torch.ones(48, 2)}
        return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(factors)}

    return make


def test_an_adapter_of_the_hub_is_merged_into_its_base_below_the_working_directory(hub, cache, adapter, tmp_path):
    base = save_tiny_model(tmp_path / "base", "llama")
    weights = load_file(base / "model.safetensors")
    torch.save(weights, base / "pytorch_model.bin")
    files_of_base = {path.name: path.read_bytes() for path in base.iterdir() if path.name != "model.safetensors"}
    hub.add("some/base", files_of_base)
    hub.add("some/adapter", adapter("some/base"))

    directory = downloader(hub, cache).ensure(Weights("some/adapter", merge_lora=True))
    hub.requests.clear()
    again = downloader(hub, cache).ensure(Weights("some/adapter", merge_lora=True))

    assert directory == again == Path("some/adapter")
    assert hub.requests == []
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(load_file(tmp_path / "some/adapter/model.safetensors")[name], weights[name] + 2)
    assert (tmp_path / "some/adapter/tokenizer.json").is_file()


def test_an_adapter_of_the_hub_is_fetched_as_it_is_unless_it_is_to_be_merged(hub, cache, adapter):
    hub.add("some/adapter", adapter("some/base"))

    directory = downloader(hub, cache).ensure(Weights("some/adapter"))

    assert sorted(path.name for path in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_local_adapter_is_merged_where_it_lies(hub, cache, adapter, tmp_path):
    base = save_tiny_model(tmp_path / "base", "llama")
    for name, content in adapter(str(base)).items():
        (tmp_path / name).write_bytes(content)

    downloader(hub, cache).ensure(Weights("."))

    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("base_model_id", "reason"),
    [
        ("/home/author/model", "a path on its author's machine"),
        ("../model", "a path on its author's machine"),
        ("some/adapter", "some/adapter has itself as its base model"),
        ("nobody/nothing", "model 'nobody/nothing' does not exist"),
    ],
)
def test_an_adapter_whose_base_cannot_be_had_is_an_error(hub, cache, adapter, base_model_id, reason):
    hub.add("some/adapter", adapter(base_model_id))

    with pytest.raises(StartupError, match=reason):
        downloader(hub, cache).ensure(Weights("some/adapter", merge_lora=True))


def test_an_adapter_of_a_preset_is_refused(hub, cache, adapter, tmp_path):
    for name, content in adapter("preset:tiny-llama").items():
        (tmp_path / name).write_bytes(content)

    with pytest.raises(UnsupportedError, match="an adapter of preset:tiny-llama is not served"):
        downloader(hub, cache).ensure(Weights("."))


def test_local_directory_with_weights_needs_no_hub(hub, cache, tmp_path):
    (tmp_path / "model.safetensors").touch()

    assert downloader(hub, cache).ensure(Weights(str(tmp_path))) == tmp_path
    assert hub.requests == []


def test_local_directory_without_weights_is_an_error(hub, cache, tmp_path):
    (tmp_path / "training_args.safetensors").touch()

    with pytest.raises(StartupError, match=r"no \.safetensors weights found in"):
        downloader(hub, cache).ensure(Weights(str(tmp_path)))


def test_the_error_of_a_local_directory_names_files_that_its_index_misses(hub, cache, tmp_path):
    (tmp_path / SHARDS[0]).touch()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))

    with pytest.raises(StartupError, match=r"names files that are not there: b\.safetensors"):
        downloader(hub, cache).ensure(Weights(str(tmp_path)))


def test_local_directory_names_a_missing_shard(hub, cache, tmp_path):
    (tmp_path / SHARDS[0]).touch()

    with pytest.raises(StartupError, match=f"has {SHARDS[0]} without {SHARDS[1]}"):
        downloader(hub, cache).ensure(Weights(str(tmp_path)))


def test_a_conversion_that_was_interrupted_is_finished(hub, cache, tmp_path):
    for n in (1, 2):
        torch.save({f"w{n}": torch.ones(n)}, tmp_path / f"pytorch_model-0000{n}-of-00002.bin")
    (tmp_path / SHARDS[0]).write_bytes(save({"w1": torch.ones(1)}))

    downloader(hub, cache).ensure(Weights(str(tmp_path)))

    assert load_file(tmp_path / SHARDS[1])["w2"].tolist() == [1.0, 1.0]
    assert (tmp_path / "model.safetensors.index.json").is_file()


def test_local_pickles_stay_as_they_are_without_conversion(hub, cache, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")

    downloader(hub, cache).ensure(Weights(str(tmp_path), auto_convert=False))

    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_override_directory_goes_before_the_hub(hub, cache, tmp_path):
    (tmp_path / "model.safetensors").touch()

    assert downloader(hub, cache).ensure(Weights("some/model", override=tmp_path)) == tmp_path
    with pytest.raises(StartupError, match=r"no \.safetensors weights"):
        downloader(hub, cache).ensure(Weights("some/model", override=tmp_path / "missing"))


@pytest.mark.parametrize("name", ["tiny-llama", "llama-125m"])
def test_presets_have_nothing_to_download(hub, cache, name):
    downloader(hub, cache).ensure(Weights(f"preset:{name}"))

    assert hub.requests == []


def test_unknown_preset_is_refused(hub, cache):
    with pytest.raises(UnsupportedError, match="preset"):
        downloader(hub, cache).ensure(Weights("preset:none"))


def test_a_long_download_reports_its_progress(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "before").write_bytes(bytes(500_000))

    with download.logged_progress(tmp_path, "model.safetensors", period_s=0.01):
        (tmp_path / "etag.incomplete").write_bytes(bytes(1_200_000))
        while "1.2 MB so far" not in caplog.text:
            time.sleep(0.01)


def test_examples_in_the_docstrings():
    assert doctest.testmod(files).failed == 0
