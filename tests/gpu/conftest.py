"""Tests that need a GPU: `pytest -m gpu tests/gpu`. Without a GPU they fail; none is skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.device import choose_device, make_current
from tests.support.models.tiny_models import save_tiny_model
from tests.support.models.tiny_shards import tiny_options

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
    """A tiny float32 Llama with run-ahead, and CUDA graphs for decode steps of one, two and four rows."""
    yield from loaded(directory)


@pytest.fixture
def plain(gpu: torch.device, directory: Path) -> Iterator[LocalShard]:
    """The same model without graphs and run-ahead."""
    yield from loaded(directory, cuda_graphs=(0,), run_ahead=False)


def loaded(directory: Path, **changes: object) -> Iterator[LocalShard]:
    options = {"memory_fraction": MEMORY_FRACTION, "cuda_graphs": GRAPH_SIZES, **changes}
    shard = LocalShard.load(tiny_options(directory, **options))
    # Serving uses tensor cores; the expected ids are those of full float32.
    torch.set_float32_matmul_precision("highest")
    yield shard
    shard.close()
    if shard.engine.model.graphs is not None:
        shard.engine.model.graphs.release()
    shard.engine.state.cache = None
    torch.cuda.empty_cache()
