"""The files of a model on this machine: those of a preset, of a local directory or of the hub's cache."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reference_server.errors import StartupError
from reference_server.presets import catalog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """Directories of a model. `is_from_hub`: they are a snapshot in the hub's cache."""

    directory: Path
    tokenizer_directory: Path
    has_weights: bool = True
    is_from_hub: bool = False


def locate_local(model_id: str) -> ModelPaths | None:
    """The files of a preset or of a directory; None for a model of the hub.

    Raises UnsupportedError for a preset that does not exist, and StartupError for such a path.
    """
    preset = catalog.find(model_id)
    if preset is not None:
        return ModelPaths(preset.directory, preset.tokenizer_directory, preset.has_weights)
    directory = Path(model_id)
    if model_id and directory.is_dir():
        return ModelPaths(directory, directory)
    if model_id.startswith(("/", "./", "../")):
        raise StartupError(f"{model_id!r} is neither a directory nor the name of a model")
    return None


def locate(model_id: str, revision: str | None, cache: Path | None, patterns: Sequence[str]) -> ModelPaths:
    """The files of any model; those of the hub are downloaded, or taken from its cache if the hub is not reached.

    revision, cache, patterns: for a model of the hub; a preset or a directory has no revisions.
    Raises StartupError if there are no such files.
    """
    local = locate_local(model_id)
    if local is not None:
        if revision is not None:
            logger.warning("`revision` %s is ignored: %s is not a model of the hub", revision, model_id)
        return local
    # Imported here: it takes 0.3 s.
    import huggingface_hub

    try:
        snapshot = huggingface_hub.snapshot_download(
            model_id, revision=revision, cache_dir=cache, allow_patterns=list(patterns)
        )
    except Exception as error:
        raise StartupError(
            f"model {model_id!r} is not a preset, not a local directory, not in the hub cache, and could not be"
            f" fetched: {error}"
        ) from error
    return ModelPaths(Path(snapshot), Path(snapshot), is_from_hub=True)
