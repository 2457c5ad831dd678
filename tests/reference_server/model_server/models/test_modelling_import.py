"""The modules that `import_modelling` loads in a new interpreter, and those that it leaves out."""

import subprocess
import sys

import pytest

UNUSED = ("torch._dynamo", "torch.distributed.tensor", "sympy", "triton", "scipy", "accelerate")
SERVE = """
import asyncio, sys
from reference_server.model_server.models.modelling_import import import_modelling
import_modelling()
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions

async def main():
    shard = LocalShard.load(EngineOptions("preset:tiny-llama", cpu_memory_gib=0.5, compute_threads=1))
    request = Request(0, ("_test " * 64,), 64, ChooserParameters(), StoppingParameters(1))
    await shard.warmup(WarmupRequest(Batch(0, (request,)), 64))
    shard.close()

asyncio.run(main())
"""
INDEX_MODE = """
import sys, torch
from reference_server.model_server.models.modelling_import import import_modelling
import_modelling()
from transformers import masking_utils
assert not hasattr(sys.modules.get("torch._dynamo"), "eval_frame")
rows = torch.arange(3)
with masking_utils.TransformGetItemToIndex():
    found = torch.vmap(lambda row: torch.ones(3)[row] * row)(rows)
assert found.tolist() == [0, 1, 2]
assert torch.compiler.disable(len)([1]) == 1 and torch._dynamo.eval_frame
"""


# In the short suite, `test_sharded.py` tests the modules of a rank's process.
@pytest.mark.slow
def test_a_shard_imports_no_compiler() -> None:
    loaded = _run(SERVE + "\nprint(*sys.modules)").split()

    assert set(UNUSED).isdisjoint(loaded)


@pytest.mark.slow
def test_parts_of_the_compiler_are_imported_at_their_first_use() -> None:
    _run(INDEX_MODE)


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
