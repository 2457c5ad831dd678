"""Writes `preset:tiny-llama` as a GGUF file for llama.cpp."""

from pathlib import Path

from benchmarks.peers import gguf_file
from reference_server.model_files import locate_local


def write_gguf(path: Path) -> Path:
    """Write the model to `path`. Returns the path."""
    files = locate_local("preset:tiny-llama")
    assert files is not None, "the preset is in the package"
    return gguf_file.write_gguf(files.directory, path, files.tokenizer_directory)
