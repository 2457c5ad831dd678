"""vLLM and llama-server, where they are installed: launched on `preset:tiny-llama` with their defaults.

TGI_BENCH_VLLM: the Python of an environment that has vLLM; by default the one in the folder of the `vllm` command.
TGI_BENCH_LLAMA_SERVER: the llama-server program; by default the one on the PATH.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadgen.target.launched.launched_target import LaunchedTarget
from loadgen.target.target import Target
from reference_server.model_files import locate_local
from tests.support.models.checkpoints.gguf_file import write_gguf

VLLM_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm(folder: Path, *flags: str, **variables: str) -> Iterator[Target]:
    """A running vLLM. Skips the test if it is not installed."""
    python = os.environ.get("TGI_BENCH_VLLM") or _beside(shutil.which("vllm"))
    if python is None or not Path(python).is_file():
        pytest.skip("vLLM is not installed: set TGI_BENCH_VLLM to the Python of its environment")
    words = ["--model", str(_model_directory(folder)), "--served-model-name", "model", "--max-model-len", "1024"]
    words += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16", *flags]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *words]
    environment = VLLM_VARIABLES | {"VLLM_CACHE_ROOT": str(folder / "vllm")} | variables
    with LaunchedTarget(command, folder / "vllm.log", environment=environment) as target:
        yield target


@contextmanager
def llama_server(folder: Path, *flags: str) -> Iterator[Target]:
    """A running llama-server. Skips the test if it is not installed."""
    program = os.environ.get("TGI_BENCH_LLAMA_SERVER") or shutil.which("llama-server")
    if program is None or not Path(program).is_file():
        pytest.skip("llama-server is not installed: set TGI_BENCH_LLAMA_SERVER to its path")
    model = write_gguf(folder / "tiny-llama.gguf")
    words = ["-m", str(model), "--host", "127.0.0.1", "--port", "{port}", *flags]
    with LaunchedTarget([program, *words], folder / "llama.log") as target:
        yield target


def _beside(program: str | None) -> str | None:
    return None if program is None else str(Path(program).resolve().parent / "python")


def _model_directory(folder: Path) -> Path:
    files = locate_local("preset:tiny-llama")
    assert files is not None, "the preset is in the package"
    directory = folder / "model"
    for source in (files.directory, files.tokenizer_directory):
        shutil.copytree(source, directory, dirs_exist_ok=True)
    return directory
