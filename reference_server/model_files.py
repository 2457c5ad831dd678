"""The files of a model on this machine: those of a preset, of a local directory or of the hub's cache.

A speculator consists of heads that draft for another model, its base. Its config names the base, which is loaded as the
model.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reference_server.errors import StartupError, UnsupportedError
from reference_server.json_files import read_json
from reference_server.presets import catalog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """Directories of a model.

    is_from_hub: the requested one is a snapshot in the hub's cache. speculator: the directory of the heads that draft
    for the model, if these were requested.
    """

    directory: Path
    tokenizer_directory: Path
    has_weights: bool = True
    is_from_hub: bool = False
    speculator: Path | None = None


def is_speculator(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of Medusa heads or of an MLP speculator, as TGI recognises them."""
    return "medusa_num_heads" in config or config.get("model_type") == "mlp_speculator"


def base_model(config: Mapping[str, Any]) -> str | None:
    """The model that a speculator drafts for; None for any other model. Raises StartupError without a name."""
    if not is_speculator(config):
        return None
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise StartupError(f"a speculator names its base model in `base_model_name_or_path`, but that is {base!r:.80}")
    return base


def config_of(directory: Path) -> dict[str, Any]:
    """The config.json in a directory; empty if there is none that can be read."""
    try:
        return read_json(directory / "config.json")
    except StartupError:
        return {}


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

    revision, cache, patterns: for a model of the hub; a preset or a directory has no revisions. The base of a
    speculator has its default revision, as in TGI. Raises StartupError if there are no such files.
    """
    found = _locate(model_id, revision, cache, patterns)
    base = base_model(config_of(found.directory))
    if base is None:
        return found
    paths = _locate(base, None, cache, patterns)
    if is_speculator(config_of(paths.directory)):
        raise UnsupportedError(f"{model_id} drafts for {base}, which is a speculator too: name a model as its base")
    return replace(paths, is_from_hub=found.is_from_hub, speculator=found.directory)


def _locate(model_id: str, revision: str | None, cache: Path | None, patterns: Sequence[str]) -> ModelPaths:
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
