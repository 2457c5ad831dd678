"""The paged kernels of a CPU against dense attention in float64, over block tables in random order."""

import pytest
import torch

from reference_server.model_server.attention import torch_backend
from reference_server.model_server.attention.conformance import (
    CASES,
    ROWS,
    ConformanceCase,
    metadata_of,
    paged_layer,
    run,
    shuffled_table,
)
from reference_server.model_server.attention.select import COMPILED, TORCH, AttentionBackend
from reference_server.model_server.attention.store import TorchStore
from reference_server.model_server.attention.torch_backend import TorchDecode, TorchPrefill
from reference_server.model_server.step_state import Step, StepTensors

CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", [COMPILED, TORCH], ids=lambda backend: backend.name)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_paged_attention_equals_dense_attention(case: ConformanceCase, rows: str, backend: AttentionBackend) -> None:
    needs = case.needs(CPU, torch.float32)
    assert backend.decode is not None
    if not (backend.prefill.supports(needs) and backend.decode.supports(needs)):
        pytest.skip(f"{backend.name} does not offer {needs}")

    outcome = run(backend.prefill(), backend.decode(), backend.store(), case, ROWS[rows], CPU)

    torch.testing.assert_close(outcome.output, outcome.expected, atol=2e-6, rtol=2e-5)


def test_decode_in_many_tiles_equals_decode_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    case, lengths = ConformanceCase(num_kv_heads=2), [40, 3, 17, 1, 90]
    table, num_blocks = shuffled_table(lengths, case.block_size)
    kernels = TorchPrefill(), TorchDecode(), TorchStore()
    layer = paged_layer(case, num_blocks, *kernels, CPU, torch.float32)
    assert layer.state.cache is not None
    cache = layer.state.cache.layers[0].buffer
    cache.copy_(torch.randn(cache.shape, generator=generator))
    query = torch.randn(len(lengths), case.num_heads, case.head_dim, generator=generator)
    key_value = torch.randn(len(lengths), 2, case.num_kv_heads, case.head_dim, generator=generator)
    outputs = []

    for tile_bytes in (torch_backend.TILE_BYTES, 1):
        monkeypatch.setattr(torch_backend, "TILE_BYTES", tile_bytes)
        metadata = metadata_of(table, [(length - 1, length) for length in lengths], case.block_size)
        with layer.state.use(Step(metadata, StepTensors.of_host(metadata))):
            outputs.append(layer(query, key_value))

    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-6)
