"""What runs where there is a GPU: `pytest -m gpu tests/gpu`. Without one every test here fails, none is left out."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reference_server.model_server.device import choose_device, make_current
from reference_server.model_server.shard import LocalShard
from tests.support.tiny_models import save_tiny_model
from tests.support.tiny_shards import tiny_options

MEMORY_FRACTION = 0.2
GRAPH_SIZES = (1, 2, 4)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    device = choose_device()
    assert device.type == "cuda", "torch sees no GPU"
    make_current(device)
    return device


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def shard(gpu: torch.device, directory: Path) -> Iterator[LocalShard]:
    """A tiny float32 Llama as it is served: run-ahead on, decode steps of one, two and four rows captured."""
    yield from loaded(directory)


@pytest.fixture
def plain(gpu: torch.device, directory: Path) -> Iterator[LocalShard]:
    """The same without graphs and without run-ahead."""
    yield from loaded(directory, cuda_graphs=(0,), run_ahead=False)


def loaded(directory: Path, **changes: object) -> Iterator[LocalShard]:
    options = {"memory_fraction": MEMORY_FRACTION, "cuda_graphs": GRAPH_SIZES, **changes}
    shard = LocalShard.load(tiny_options(directory, **options))
    # Serving takes tensor cores; ids are compared with those of full float32.
    torch.set_float32_matmul_precision("highest")
    yield shard
    shard.close()
    if shard._engine._model.graphs is not None:
        shard._engine._model.graphs.release()
    shard._engine._state.cache = None
    torch.cuda.empty_cache()
