"""The Triton kernels on a CPU, by Triton's interpreter: their results in each case, as JSON lines.

A process of its own: the interpreter is chosen by the environment when the kernels are imported, and other tests
compile the same kernels. bfloat16 products are wrong in the interpreter, so they are compiled and not computed here.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from reference_server.model_server.attention import triton_backend
from reference_server.model_server.attention.conformance import CASES, ROWS, ConformanceCase, Rows, metadata_of, run
from reference_server.model_server.attention.kernel import AttentionOptions
from reference_server.model_server.attention.staging import upload
from reference_server.model_server.attention.store import TritonStore
from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.models.adapters.triton_product import TritonProduct
from reference_server.model_server.models.fused.operators import Norm, TorchOperators, TritonOperators
from reference_server.model_server.step_state import Step
from tests.support.models import adapter_products

CPU = torch.device("cpu")


# A few rows that cross tiles and pages: the interpreter takes some milliseconds a program.
SHORT = {"decode": [(1, 1), (1, 40)], "prefill": [(4, 4), (18, 35)]}


def main() -> None:
    np.seterr(all="ignore")
    # Small tiles, so that few tokens make several.
    triton_backend.DECODE_TILE = triton_backend.PREFILL_QUERIES = triton_backend.PREFILL_TILE = 16
    if "--long-rows" in sys.argv:
        # Decode rows and prompts in one step use both kernels. The longest prompt takes most of the time.
        *rows, longest = ROWS["mixed"]
        for (name, case), dtype in itertools.product(CASES.items(), (torch.float32, torch.float16)):
            report(f"{name}, mixed", case, rows, dtype)
        report("longest", CASES["softcap, grouped, window"], [rows[0], longest], torch.float32)
        return
    for (name, case), (kind, rows) in itertools.product(CASES.items(), SHORT.items()):
        report(f"{name}, {kind}", case, rows, torch.float32)
    report("grouped, mixed", CASES["grouped"], [*SHORT["decode"], *SHORT["prefill"]], torch.float16)
    # A device with few processors: one split walks all of a row's tiles.
    triton_backend.DEFAULT_PROCESSORS = 1
    triton_backend.processors.cache_clear()
    report("one split", CASES["softcap, grouped, window"], SHORT["decode"], torch.float32)
    for name, error in decoder_operators():
        print(json.dumps({"case": name, "dtype": "float32", "error": error}))
    for tokens, inputs in adapter_products.SHAPES:
        for dtype in (torch.float32, torch.float16):
            outcome = adapter_products.run(TritonProduct(CPU), tokens, inputs, dtype, CPU)
            error = outcome.relative_error if outcome.untouched else float("inf")
            case = f"adapters, {tokens} tokens of {inputs}"
            print(json.dumps({"case": case, "dtype": str(dtype).removeprefix("torch."), "error": error}))
    print(json.dumps({"case": "empty row", "dtype": "float32", "error": empty_row()}))
    print(json.dumps({"case": "skipped slot", "dtype": "float32", "error": skipped_slot()}))


def report(name: str, case: ConformanceCase, rows: Rows, dtype: torch.dtype) -> None:
    kernels = triton_backend.TritonPrefill(), triton_backend.TritonDecode(), TritonStore()
    error = run(*kernels, case, rows, CPU, dtype, make_tensors=partial(upload, device=CPU)).relative_error
    print(json.dumps({"case": name, "dtype": str(dtype).removeprefix("torch."), "error": error}))


def decoder_operators() -> Iterator[tuple[str, float]]:
    """The largest difference of each operator between a decoder's products from plain torch's."""
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    triton_operators, torch_operators = TritonOperators(), TorchOperators()
    norms = {
        "norm": Norm(drawn(40), 1e-5),
        "layer norm": Norm(drawn(40), 1e-5, centered=True),
        "layer norm with bias": Norm(drawn(40), 1e-5, drawn(40), centered=True),
    }
    for name, norm in norms.items():
        for delta in (None, drawn(3, 40)):
            hidden = drawn(3, 40)
            results = []
            for operators in (triton_operators, torch_operators):
                residual = hidden.clone()
                results.append((operators.add_norm(residual, delta, norm), residual))
            yield f"{name}{'' if delta is None else ' of a sum'}", _distance(*results)
    # Heads as a part of a packed product's rows, and only a part of each head turned.
    heads, table, positions = drawn(3, 5, 24)[:, :4], drawn(9, 2, 16), torch.tensor([0, 8, 3])
    for name, act in {
        "norm of heads": lambda operators, own: operators.norm_heads(own, Norm(norms["norm"].weight[:24], 1e-6)),
        "rotation": lambda operators, own: operators.rotate(own, table, positions),
    }.items():
        turned = []
        for operators in (triton_operators, torch_operators):
            own = heads.clone()
            act(operators, own)
            turned.append((own,))
        yield name, _distance(*turned)
    gate_up = drawn(3, 80)
    yield "gate", _distance((triton_operators.silu_mul(gate_up),), (torch_operators.silu_mul(gate_up.clone()),))


def _distance(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def empty_row() -> float:
    """The largest magnitude that rows of length 0 get, in one split and in many."""
    found = 0.0
    for rows in (1, 3):
        metadata = metadata_of(np.zeros((rows, 1), dtype=np.int64), [(0, 1)] * rows, 16)
        metadata.seqlen_k[:] = 0
        triton_backend.DEFAULT_PROCESSORS = 132 if rows == 1 else 1
        triton_backend.processors.cache_clear()
        output = triton_backend.TritonDecode()(
            torch.ones(rows, 2, 16),
            LayerCache(torch.full((2, 2, 1, 16, 16), 7.0)),
            Step(metadata, upload(metadata, CPU)),
            AttentionOptions(1.0),
        )
        found = max(found, float(output.abs().max()))
    return found


def skipped_slot() -> float:
    """The change of the cache by a store to a negative slot."""
    cache = torch.zeros(2, 2, 1, 16, 16)
    metadata = metadata_of(np.zeros((1, 1), dtype=np.int64), [(0, 1)], 16)
    metadata.slots[:] = -1
    TritonStore()(torch.ones(1, 2, 1, 16), LayerCache(cache), Step(metadata, upload(metadata, CPU)))
    return float(cache.abs().max())


if __name__ == "__main__":
    main()
