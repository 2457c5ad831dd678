"""Gets a model's weights as safetensors, from local files, the hub's cache or the hub, in that order.

Pickled weights are converted, and an adapter is merged into its base model.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from reference_server.errors import StartupError, UnsupportedError
from reference_server.model_files import base_model, config_of, is_speculator, locate_local
from reference_server.model_server.weights.files import (
    ADAPTER_FILES,
    INDEX_FILES,
    SAFETENSORS,
    converted_name,
    file_names,
    is_adapter,
    missing_shards,
    pickled_names,
    small_names,
    weight_files,
    weight_names,
)
from reference_server.model_server.weights.hub import HuggingFaceHub, Snapshot, first_line
from reference_server.presets import catalog

if TYPE_CHECKING:
    from reference_server.model_server.weights.adapter import Adapter

logger = logging.getLogger(__name__)

TRIES = 5
RETRY_PAUSE_S = 5.0
PROGRESS_S = 15.0
Result = TypeVar("Result")
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights to get. With `override`, the files must be in that flat directory."""

    model_id: str
    revision: str | None = None
    extension: str = SAFETENSORS
    override: Path | None = None
    auto_convert: bool = True
    merge_lora: bool = False
    trust_remote_code: bool = False


class Downloader:
    """Downloads from `hub`; `sleep` waits between tries."""

    def __init__(self, hub: HuggingFaceHub, sleep: Callable[[float], None] = time.sleep) -> None:
        self._hub = hub
        self._sleep = sleep
        self._under_way: set[str] = set()

    def ensure(self, wanted: Weights) -> Path:
        """Get the weights and return their directory. Raises StartupError if that fails."""
        if wanted.model_id in self._under_way:
            raise StartupError(f"{wanted.model_id} has itself as its base model")
        self._under_way.add(wanted.model_id)
        try:
            return self._ensure(wanted)
        finally:
            self._under_way.remove(wanted.model_id)

    def _ensure(self, wanted: Weights) -> Path:
        preset = catalog.find(wanted.model_id)
        if preset is not None:
            kind = "ships its weights" if preset.has_weights else "has seeded random weights"
            logger.info("%s %s: nothing to download", wanted.model_id, kind)
            return preset.directory
        local = locate_local(wanted.model_id)
        directory = wanted.override or (local.directory if local else None)
        return self._ensure_cached(wanted) if directory is None else self._ensure_local(wanted, directory)

    def _ensure_local(self, wanted: Weights, directory: Path) -> Path:
        names = file_names(directory)
        if is_adapter(names):
            return self._merge(wanted, _adapter(directory), directory)
        self._ensure_base(wanted, directory)
        if _is_whole(wanted, directory, names):
            logger.info("Files are already present on the host. Skipping download.")
            return directory
        self._fetch_parent(wanted, directory)
        pickled = pickled_names(directory, names) if wanted.extension == SAFETENSORS else []
        if not pickled:
            raise StartupError(f"no {wanted.extension} weights found in {directory}")
        self._convert(wanted, directory, pickled)
        return directory

    def _ensure_cached(self, wanted: Weights) -> Path:
        listing = f"the file list of {wanted.model_id}"
        snapshot = self._retrying(listing, lambda: self._hub.snapshot(wanted.model_id, wanted.revision))
        self._fetch_small_files(wanted, snapshot)
        self._ensure_base(wanted, snapshot.directory)
        if wanted.merge_lora and is_adapter(snapshot.names):
            return self._merge_cached(wanted, snapshot)
        self._fetch_parent(wanted, snapshot.directory)
        weights = weight_names(snapshot.names, wanted.extension)
        lost = missing_shards(weights)
        if weights and not lost:
            self._fetch_all(snapshot, weights)
        elif wanted.extension == SAFETENSORS and wanted.auto_convert and (pickled := self._pickled(snapshot)):
            self._fetch_all(snapshot, [name for name in pickled if not snapshot.has(converted_name(name))])
            self._convert(wanted, snapshot.directory, pickled)
        else:
            raise StartupError(f"model {wanted.model_id} {_lack(wanted, weights, lost)} {snapshot.place}")
        self._hub.remember(snapshot, wanted.revision)
        return snapshot.directory

    def _pickled(self, snapshot: Snapshot) -> list[str]:
        return pickled_names(snapshot.directory, snapshot.names)

    def _merge_cached(self, wanted: Weights, snapshot: Snapshot) -> Path:
        """Merge into a directory named like the adapter, below the working directory, as TGI does."""
        self._fetch_all(snapshot, [name for name in ADAPTER_FILES if name in snapshot.names][:1])
        self._hub.remember(snapshot, wanted.revision)
        adapter = _adapter(snapshot.directory)
        if not _REPOSITORY.fullmatch(adapter.base_model_id):
            raise StartupError(
                f"the adapter {wanted.model_id} is of {adapter.base_model_id!r}, which is a path on its author's"
                " machine: download it and put your own in its adapter_config.json"
            )
        return self._merge(wanted, adapter, Path(wanted.model_id))

    def _merge(self, wanted: Weights, adapter: "Adapter", target: Path) -> Path:
        from reference_server.model_server.weights.merge import merge

        if catalog.find(adapter.base_model_id) is not None:
            raise UnsupportedError(
                f"an adapter of {adapter.base_model_id} is not served: it has no directory of its own"
            )
        logger.info("Merging the adapter %s into %s", wanted.model_id, adapter.base_model_id)
        base = self.ensure(
            Weights(adapter.base_model_id, adapter.base_revision, trust_remote_code=wanted.trust_remote_code)
        )
        if wanted.trust_remote_code:
            logger.warning("code that comes with %s may be run, from %s", adapter.base_model_id, base)
        merge(adapter, base, target, wanted.trust_remote_code)
        return target

    def _convert(self, wanted: Weights, directory: Path, pickled: Sequence[str]) -> None:
        if not wanted.auto_convert:
            logger.info("%s stay as they are: conversion is off", ", ".join(pickled))
            return
        if all((directory / converted_name(name)).is_file() for name in pickled) and _is_indexed(directory, pickled):
            return
        if not wanted.trust_remote_code:
            logger.warning("Nothing but tensors is read from pickles, whatever else they hold: %s", ", ".join(pickled))
        from reference_server.model_server.weights.convert import convert

        convert(directory, pickled)

    def _ensure_base(self, wanted: Weights, directory: Path) -> None:
        """Get the model that a speculator drafts for."""
        base = base_model(config_of(directory))
        if base is not None:
            logger.info("%s drafts for %s, which is downloaded too", wanted.model_id, base)
            self.ensure(replace(wanted, model_id=base, revision=None, override=None, merge_lora=False))

    def _fetch_parent(self, wanted: Weights, directory: Path) -> None:
        """Download the base model in any other config.json; failures are only logged."""
        if is_speculator(config_of(directory)):
            return
        parent = _parent(directory / "config.json")
        if parent is None or parent in self._under_way or not _REPOSITORY.fullmatch(parent):
            return
        logger.info("%s has the base model %s, which is downloaded too", wanted.model_id, parent)
        try:
            self.ensure(replace(wanted, model_id=parent, revision=None, override=None, merge_lora=False))
        except StartupError as error:
            logger.warning("%s could not be fetched: %s", parent, error)

    def _fetch_small_files(self, wanted: Weights, snapshot: Snapshot) -> None:
        """Download config and tokenizer, to serve the model offline."""
        for name in small_names(snapshot.names, wanted.trust_remote_code):
            if not snapshot.has(name):
                self._fetch(snapshot, name)

    def _fetch_all(self, snapshot: Snapshot, names: Sequence[str]) -> None:
        missing = [name for name in names if not snapshot.has(name)]
        if not missing:
            logger.info("Files are already present on the host. Skipping download.")
            return
        started = time.monotonic()
        for done, name in enumerate(missing, start=1):
            logger.info("Download file: %s", name)
            with logged_progress(self._hub.blobs(snapshot.model_id), name):
                self._fetch(snapshot, name)
            remaining_s = (time.monotonic() - started) / done * (len(missing) - done)
            logger.info("Download: [%d/%d] -- ETA: %s", done, len(missing), timedelta(seconds=round(remaining_s)))

    def _fetch(self, snapshot: Snapshot, name: str) -> None:
        self._retrying(f"{name} of {snapshot.model_id}", lambda: self._hub.fetch(snapshot, name))

    def _retrying(self, name: str, call: Callable[[], Result]) -> Result:
        """The result of `call`, which is tried again after errors that may be temporary."""
        attempt = 1
        while True:
            try:
                return call()
            except StartupError:
                raise
            except Exception as error:
                if attempt == TRIES:
                    raise StartupError(f"could not download {name}: {first_line(error)}") from error
                logger.warning("Download of %s failed, try %d of %d: %s", name, attempt, TRIES, first_line(error))
            self._sleep(RETRY_PAUSE_S)
            attempt += 1


def _is_whole(wanted: Weights, directory: Path, names: Sequence[str]) -> bool:
    """Whether all weights are present. Raises StartupError if only some are and they cannot be converted."""
    weights = weight_names(names, wanted.extension)
    if not weights:
        return False
    if wanted.extension == SAFETENSORS and INDEX_FILES[0] in names:
        weight_files(directory)
    lost = missing_shards(weights)
    if lost and not _can_convert(names, weights):
        raise StartupError(f"{directory} {_lack(wanted, weights, lost)}")
    return not lost


def _is_indexed(directory: Path, pickled: Sequence[str]) -> bool:
    """Whether a conversion of several files has written their index, its last step."""
    return len(pickled) == 1 or (directory / INDEX_FILES[0]).is_file()


def _lack(wanted: Weights, weights: Sequence[str], lost: Sequence[str]) -> str:
    return f"has {', '.join(weights)} without {', '.join(lost)}" if weights else f"has no {wanted.extension} weights"


def _can_convert(names: Sequence[str], weights: Sequence[str]) -> bool:
    """Whether `weights` are left from an interrupted conversion."""
    return set(weights) < {converted_name(name) for name in weight_names(names, ".bin")}


def _adapter(directory: Path) -> "Adapter":
    """Read an adapter. Imports torch, which a plain download does not need."""
    from reference_server.model_server.weights.adapter import Adapter

    return Adapter.open(directory)


def _parent(config: Path) -> str | None:
    try:
        parent = json.loads(config.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return parent if isinstance(parent, str) and parent else None


@contextmanager
def logged_progress(blobs: Path, name: str, period_s: float = PROGRESS_S) -> Iterator[None]:
    """Log the bytes of a long download so far, whether huggingface_hub writes them or resume.py."""
    done = threading.Event()
    before = _bytes_below(blobs)

    def report() -> None:
        while not done.wait(period_s):
            logger.info("Download file: %s, %.1f MB so far", name, (_bytes_below(blobs) - before) / 1e6)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_below(directory: Path) -> int:
    """The bytes in a directory; 0 if a file is renamed meanwhile."""
    try:
        return sum(path.stat().st_size for path in directory.iterdir())
    except OSError:
        return 0
