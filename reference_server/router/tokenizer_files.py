"""The model files that the router reads: configuration, tokenizer and chat template."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reference_server.model_files import locate
from reference_server.router.chat.prompts import TemplateSource, load_template
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
class TokenizerFiles:
    """Directories of these files. `sha` and `pipeline_tag` are the hub's; None for a local model."""

    model_id: str
    config_directory: Path
    tokenizer_directory: Path
    sha: str | None = None
    pipeline_tag: str | None = None

    def read_json(self, name: str) -> dict[str, Any]:
        """A configuration file; empty if it is missing or not valid JSON."""
        in_tokenizer = self.tokenizer_directory / name
        return _read_json(in_tokenizer if in_tokenizer.is_file() else self.config_directory / name)

    def load_template(self, tokenizer_config_path: Path | None = None) -> TemplateSource | None:
        """The chat template; None if the model has none."""
        tokenizer_config = self.tokenizer_config(tokenizer_config_path)
        files: list[Mapping[str, Any]] = [
            self.read_json("chat_template.json"),
            tokenizer_config,
            self.read_json("processor_config.json"),
        ]
        # TGI does not read this file, but newer models have their template only here.
        jinja = self.tokenizer_directory / "chat_template.jinja"
        if jinja.is_file():
            files.append({"chat_template": jinja.read_text(encoding="utf-8")})
        return load_template(files, tokenizer_config)

    def tokenizer_config(self, override: Path | None = None) -> dict[str, Any]:
        """`tokenizer_config.json`, or the file that overrides it."""
        return self.read_json("tokenizer_config.json") if override is None else _read_json(override)

    def load_tokenizer(self, trust_remote_code: bool = False) -> Tokenizer:
        """The tokenizer, extended to the model's vocabulary size. Raises `StartupError`."""
        config = self.read_json("config.json")
        vocab_size = config.get("vocab_size")
        return load_tokenizer(
            self.tokenizer_directory,
            vocab_size if isinstance(vocab_size, int) else None,
            trust_remote_code=trust_remote_code,
        )


def find_tokenizer_files(name: str, revision: str | None = None, cache: Path | None = None) -> TokenizerFiles:
    """The files of a preset, of a directory, or of a hub repository. Raises `StartupError`."""
    paths = locate(name, revision, cache, [*_CONFIG_FILES, *_TOKENIZER_FILES])
    files = TokenizerFiles(name, paths.directory, paths.tokenizer_directory)
    if not paths.is_from_hub:
        return files
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return files
    try:
        model = huggingface_hub.HfApi().model_info(name, revision=revision)
    except Exception as error:
        logger.warning("no model info of %s from the hub (%s): sha and pipeline tag are unknown", name, error)
        return files
    return replace(files, model_id=model.id, sha=model.sha, pipeline_tag=model.pipeline_tag)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        logger.warning("ignoring %s, which is not valid JSON: %s", path, error)
        return {}
    return value if isinstance(value, dict) else {}
