import doctest

import huggingface_hub.constants
import pytest

from reference_server.errors import StartupError, UnsupportedError
from reference_server.model_server.weights import hub as hub_module
from reference_server.model_server.weights.hub import HuggingFaceHub, Weights, ensure_weights


class FakeHub:
    """A repository of `names`; each fetch of a file fails as often as `failures` says."""

    def __init__(self, names, cached=(), failures=None, is_offline=False):
        self.is_offline = is_offline
        self.fetched = []
        self.cached = set(cached)
        self._names = names
        self._failures = failures or {}

    def names(self, model_id, revision):
        if self._names is None:
            raise StartupError(f"model {model_id!r} was not found")
        return self._names

    def is_cached(self, model_id, name, revision):
        return name in self.cached

    def fetch(self, model_id, name, revision):
        self.fetched.append((name, revision))
        if self._failures.get(name, 0) > 0:
            self._failures[name] -= 1
            raise OSError("connection reset")
        self.cached.add(name)


TWO_FILES = ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors", "config.json"]


def test_missing_files_are_fetched_in_order():
    hub = FakeHub([*TWO_FILES, "training_args.safetensors", "onnx/model.safetensors"])

    ensure_weights(Weights("some/model", revision="v1"), hub)

    assert hub.fetched == [
        ("model-00001-of-00002.safetensors", "v1"),
        ("model-00002-of-00002.safetensors", "v1"),
    ]


def test_files_in_the_cache_are_not_fetched():
    hub = FakeHub(TWO_FILES, cached=TWO_FILES)

    ensure_weights(Weights("some/model"), hub)

    assert hub.fetched == []


def test_a_file_is_tried_five_times_five_seconds_apart():
    hub = FakeHub(["model.safetensors"], failures={"model.safetensors": 4})
    pauses = []

    ensure_weights(Weights("some/model"), hub, pauses.append)

    assert len(hub.fetched) == 5
    assert pauses == [5.0] * 4


def test_the_fifth_failure_is_the_end():
    hub = FakeHub(["model.safetensors"], failures={"model.safetensors": 5})

    with pytest.raises(StartupError, match=r"could not download model\.safetensors of some/model: connection reset"):
        ensure_weights(Weights("some/model"), hub, lambda _: None)


def test_model_that_the_hub_does_not_know_is_an_error():
    hub = FakeHub(None)

    with pytest.raises(StartupError, match="'some/model' was not found"):
        ensure_weights(Weights("some/model"), hub)


def test_offline_names_what_is_missing_and_fetches_nothing():
    hub = FakeHub(TWO_FILES, cached=TWO_FILES[:1], is_offline=True)

    with pytest.raises(
        StartupError, match=r"model-00001-of-00002\.safetensors of model some/model is not in the cache"
    ):
        ensure_weights(Weights("some/model"), hub)
    assert hub.fetched == []


@pytest.mark.parametrize("ending", [".bin", ".pt"])
def test_pickled_weights_are_refused_by_name(ending, tmp_path):
    (tmp_path / f"pytorch_model{ending}").touch()

    with pytest.raises(UnsupportedError, match="--auto-convert"):
        ensure_weights(Weights("some/model"), FakeHub([f"pytorch_model{ending}"]))
    with pytest.raises(UnsupportedError, match="--auto-convert"):
        ensure_weights(Weights(str(tmp_path)), FakeHub(None))


def test_local_directory_with_weights_needs_no_hub(tmp_path):
    (tmp_path / "model.safetensors").touch()

    ensure_weights(Weights(str(tmp_path)), FakeHub(None))


def test_local_directory_without_weights_is_an_error(tmp_path):
    (tmp_path / "training_args.safetensors").touch()

    with pytest.raises(StartupError, match=r"no \.safetensors weights found in"):
        ensure_weights(Weights(str(tmp_path)), FakeHub(None))


def test_override_directory_goes_before_the_hub(tmp_path):
    (tmp_path / "model.safetensors").touch()

    ensure_weights(Weights("some/model", override=tmp_path), FakeHub(None))

    with pytest.raises(StartupError, match=r"no \.safetensors weights"):
        ensure_weights(Weights("some/model", override=tmp_path / "missing"), FakeHub(None))


@pytest.mark.parametrize("name", ["tiny-llama", "llama-125m"])
def test_presets_have_nothing_to_download(name):
    ensure_weights(Weights(f"preset:{name}"), FakeHub(None))


def test_unknown_preset_is_refused():
    with pytest.raises(UnsupportedError, match="preset"):
        ensure_weights(Weights("preset:none"), FakeHub(None))


@pytest.fixture
def cached_model(tmp_path, monkeypatch):
    """A hub cache with one file of `some/model`, and no network."""
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_model_server_M32_offline_the_cached_snapshot_is_enough(cached_model):
    hub = HuggingFaceHub(cache=cached_model)

    ensure_weights(Weights("some/model"), hub)

    assert hub.names("some/model", None) == ["model.safetensors"]


@pytest.mark.parametrize("wanted", [Weights("other/model"), Weights("some/model", revision="v2")])
def test_model_server_M32_offline_and_not_cached_fails(cached_model, wanted):
    with pytest.raises(
        StartupError, match=f"{wanted.model_id!r} at revision {wanted.revision or 'main'} is not in the cache"
    ):
        ensure_weights(wanted, HuggingFaceHub(cache=cached_model))


def test_examples_in_the_docstrings():
    assert doctest.testmod(hub_module).failed == 0
