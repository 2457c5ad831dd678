"""Where the router finds the tokenizer, the template and the facts of its model (http-api.md sections 5.1 and 5.2)."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_server.errors import StartupError
from reference_server.presets import catalog
from reference_server.router.chat import TemplateSource, load_template
from reference_server.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_CONFIG_FILES = (
    "config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.*", "merges.txt", "*_tokens*.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's small files. `sha` and `pipeline_tag` are the hub's, None for anything local."""

    model_id: str
    config_directory: Path
    tokenizer_directory: Path
    sha: str | None = None
    pipeline_tag: str | None = None

    def read_json(self, name: str) -> dict[str, Any]:
        """One of the configuration files; empty where it is missing or cannot be read."""
        in_tokenizer = self.tokenizer_directory / name
        return _read_json(in_tokenizer if in_tokenizer.is_file() else self.config_directory / name)

    def load_template(self, tokenizer_config_path: Path | None = None) -> TemplateSource | None:
        """The chat template, or None where the model has none."""
        tokenizer_config = self.tokenizer_config(tokenizer_config_path)
        files: list[Mapping[str, Any]] = [
            self.read_json("chat_template.json"),
            tokenizer_config,
            self.read_json("processor_config.json"),
        ]
        # TGI does not read this one; newer models have their template nowhere else.
        jinja = self.tokenizer_directory / "chat_template.jinja"
        if jinja.is_file():
            files.append({"chat_template": jinja.read_text(encoding="utf-8")})
        return load_template(files, tokenizer_config)

    def tokenizer_config(self, override: Path | None = None) -> dict[str, Any]:
        """`tokenizer_config.json`, or the file that takes its place."""
        return self.read_json("tokenizer_config.json") if override is None else _read_json(override)

    def load_tokenizer(self, trust_remote_code: bool = False) -> Tokenizer:
        """The tokenizer, which covers the model's whole vocabulary. Raises `StartupError`."""
        config = self.read_json("config.json")
        vocab_size = config.get("vocab_size")
        return load_tokenizer(
            self.tokenizer_directory,
            vocab_size if isinstance(vocab_size, int) else None,
            trust_remote_code=trust_remote_code,
        )


def find_model_files(name: str, revision: str | None = None, cache: Path | None = None) -> ModelFiles:
    """The files of a preset, of a directory, or of a hub repository (downloaded, or from the cache when offline)."""
    preset = catalog.find(name)
    if preset is not None:
        return ModelFiles(name, preset.directory, preset.tokenizer_directory)
    directory = Path(name)
    if directory.is_dir() and revision is None:
        return ModelFiles(name, directory, directory)
    return _fetch(name, revision, cache)


def _fetch(name: str, revision: str | None, cache: Path | None) -> ModelFiles:
    # Imported here: it takes 0.3 s and neither a preset nor a directory needs it.
    import huggingface_hub

    try:
        snapshot = Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, cache_dir=cache, allow_patterns=[*_CONFIG_FILES, *_TOKENIZER_FILES]
            )
        )
    except Exception as error:
        raise StartupError(
            f"the files of {name!r} are neither in the hub cache nor could be fetched: {error}"
        ) from error
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return ModelFiles(name, snapshot, snapshot)
    try:
        facts = huggingface_hub.HfApi().model_info(name, revision=revision)
    except Exception as error:
        logger.warning("the hub does not answer for %s (%s): its sha and pipeline tag stay unknown", name, error)
        return ModelFiles(name, snapshot, snapshot)
    return ModelFiles(facts.id, snapshot, snapshot, facts.sha, facts.pipeline_tag)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        logger.warning("%s cannot be read and is ignored: %s", path, error)
        return {}
    return value if isinstance(value, dict) else {}
