"""Weight files on this machine: which there are, and fetching those that are missing from the model hub.

Only files at the top level of a repository count, without those whose name says that they are no weights. Converting
pickled weights and merging adapters are not served yet and are refused by name.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from reference_server.errors import StartupError, UnsupportedError
from reference_server.presets import catalog

logger = logging.getLogger(__name__)

NOT_WEIGHTS = ("arguments", "args", "training")
PICKLED = (".bin", ".pt")
TRIES = 5
RETRY_PAUSE_S = 5.0


class Hub(Protocol):
    """A model hub with its cache on this machine."""

    @property
    def is_offline(self) -> bool: ...

    def names(self, model_id: str, revision: str | None) -> list[str]:
        """Files of the repository; offline, those of its cached snapshot. Raises StartupError when there is none."""
        ...

    def is_cached(self, model_id: str, name: str, revision: str | None) -> bool: ...

    def fetch(self, model_id: str, name: str, revision: str | None) -> None:
        """Bring one file into the cache."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """Which weights are wanted. With `override`, the files must lie in that flat directory."""

    model_id: str
    revision: str | None = None
    extension: str = ".safetensors"
    override: Path | None = None
    auto_convert: bool = True


def ensure_weights(wanted: Weights, hub: Hub, sleep: Callable[[float], None] = time.sleep) -> None:
    """Make sure that the weights are on this machine. Raises StartupError when they cannot be had."""
    preset = catalog.find(wanted.model_id)
    directory = wanted.override or Path(wanted.model_id)
    if preset is not None:
        kind = "ships its weights" if preset.has_weights else "has seeded random weights"
        logger.info("%s %s: nothing to download", wanted.model_id, kind)
    elif wanted.override is not None or directory.is_dir():
        _check_directory(wanted, directory)
    else:
        _ensure_cached(wanted, hub, sleep)


def weight_names(names: Sequence[str], extension: str) -> list[str]:
    """The weight files among `names`, sorted.

    >>> weight_names(["model.safetensors", "training_args.bin", "onnx/model.safetensors"], ".safetensors")
    ['model.safetensors']
    """
    return sorted(
        name
        for name in names
        if name.endswith(extension) and "/" not in name and not any(word in name for word in NOT_WEIGHTS)
    )


def _check_directory(wanted: Weights, directory: Path) -> None:
    names = [path.name for path in directory.iterdir() if path.is_file()] if directory.is_dir() else []
    if weight_names(names, wanted.extension):
        logger.info("Files are already present on the host. Skipping download.")
        return
    _refuse_conversion(wanted, names)
    raise StartupError(f"no {wanted.extension} weights found in {directory}")


def _ensure_cached(wanted: Weights, hub: Hub, sleep: Callable[[float], None]) -> None:
    names = hub.names(wanted.model_id, wanted.revision)
    weights = weight_names(names, wanted.extension)
    if not weights:
        _refuse_conversion(wanted, names)
        raise StartupError(f"no {wanted.extension} weights found for model {wanted.model_id}")
    missing = [name for name in weights if not hub.is_cached(wanted.model_id, name, wanted.revision)]
    if not missing:
        logger.info("Files are already present on the host. Skipping download.")
        return
    if hub.is_offline:
        raise StartupError(f"offline, and {', '.join(missing)} of model {wanted.model_id} is not in the cache")
    started = time.monotonic()
    for done, name in enumerate(missing, start=1):
        logger.info("Download file: %s", name)
        _fetch(wanted, name, hub, sleep)
        remaining_s = (time.monotonic() - started) / done * (len(missing) - done)
        logger.info("Download: [%d/%d] -- ETA: %s", done, len(missing), timedelta(seconds=round(remaining_s)))


def _fetch(wanted: Weights, name: str, hub: Hub, sleep: Callable[[float], None]) -> None:
    for attempt in range(1, TRIES + 1):
        try:
            hub.fetch(wanted.model_id, name, wanted.revision)
            return
        except Exception as error:
            if attempt == TRIES:
                raise StartupError(f"could not download {name} of {wanted.model_id}: {error}") from error
            logger.warning("Download of %s failed, try %d of %d: %s", name, attempt, TRIES, error)
            sleep(RETRY_PAUSE_S)


def _refuse_conversion(wanted: Weights, names: Sequence[str]) -> None:
    if wanted.extension == ".safetensors" and any(weight_names(names, extension) for extension in PICKLED):
        raise UnsupportedError(
            f"{wanted.model_id} has pickled weights only, and converting them (`--auto-convert`) is not served yet:"
            " save the model with safe_serialization=True"
        )


class HuggingFaceHub:
    """The hub behind huggingface_hub, which reads HF_HUB_OFFLINE and the cache's default place itself."""

    def __init__(self, token: str | None = None, cache: Path | None = None) -> None:
        self._token = token
        self._cache = cache

    @property
    def is_offline(self) -> bool:
        return bool(_library().constants.HF_HUB_OFFLINE)

    def names(self, model_id: str, revision: str | None) -> list[str]:
        library = _library()
        try:
            if not self.is_offline:
                return list(library.HfApi(token=self._token).list_repo_files(model_id, revision=revision))
        except library.errors.HfHubHTTPError as error:
            raise StartupError(f"model {model_id!r} was not found: {error}") from error
        except Exception as error:
            logger.warning("The hub cannot be reached, looking in the cache: %s", error)
        try:
            snapshot = library.snapshot_download(
                model_id, revision=revision, cache_dir=self._cache, local_files_only=True
            )
        except Exception as error:
            raise StartupError(
                f"model {model_id!r} at revision {revision or 'main'} is not in the cache, and the hub was not asked"
                " (HF_HUB_OFFLINE) or cannot be reached"
            ) from error
        return [path.name for path in Path(snapshot).iterdir() if path.is_file()]

    def is_cached(self, model_id: str, name: str, revision: str | None) -> bool:
        found = _library().try_to_load_from_cache(model_id, name, revision=revision, cache_dir=self._cache)
        return isinstance(found, str)

    def fetch(self, model_id: str, name: str, revision: str | None) -> None:
        _library().hf_hub_download(model_id, name, revision=revision, token=self._token, cache_dir=self._cache)


def _library() -> Any:
    """huggingface_hub, imported when it is needed, without the log handler of its own that would say all twice."""
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils.logging

    logging.getLogger("huggingface_hub").handlers.clear()
    return huggingface_hub
