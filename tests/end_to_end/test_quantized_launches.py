"""The launcher with every quantization method: plain models that it quantizes, and checkpoints that are prepared."""

from pathlib import Path

import pytest

from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.quantization.integers import instructions
from reference_server.model_server.quantization.schemes import SCHEMES
from tests.support.models.checkpoints.quantized_checkpoints import save_quantized
from tests.support.servers.launched_server import serve

KERNELS = {
    "eetq": [f"int8-{instructions()}"],
    # The head has eight bits.
    "int4": [f"int4-{instructions()}", f"int8-{instructions()}"],
    "fp8": ["fp8-bf16" if hasattr(build.kernels(), "float8_linear") else "dequantize"],
    "bitsandbytes": ["bitsandbytes"],
    "bitsandbytes-nf4": ["bitsandbytes"],
    "bitsandbytes-fp4": ["bitsandbytes"],
}
LARGE = "preset:llama-125m"


def test_every_method_for_plain_checkpoints_is_launched_here() -> None:
    assert set(KERNELS) == {scheme.name for scheme in SCHEMES if scheme.quantize is not None}


@pytest.mark.slow
@pytest.mark.parametrize("method", KERNELS)
def test_a_method_is_launched_and_named_in_info(method: str) -> None:
    with serve("--quantize", method, "--model-id", LARGE, "--cpu-memory-gib", "1") as server:
        ids = server.token_ids("The river", max_new_tokens=4)
        engine = server.get("/info")["engine"]

    assert len(ids) == 4
    assert engine["quantize"] == method
    assert [name for name in engine["kernels"] if name != "walk"] == ["fused", *KERNELS[method]]


@pytest.mark.slow
@pytest.mark.parametrize("method", KERNELS)
def test_two_shards_quantize_a_part_each(method: str) -> None:
    with serve("--quantize", method, "--num-shard", "2") as server:
        ids = server.token_ids("The river", max_new_tokens=4)
        engine = server.get("/info")["engine"]

    assert len(ids) == 4
    assert engine["quantize"] == method


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "stored_as"),
    [
        *(("awq", "awq"), ("gptq", "gptq-act-order"), ("gptq", "awq"), ("marlin", "gptq"), ("marlin", "awq")),
        *(("fp8", "fp8-block"), ("compressed-tensors", "ct-int4"), ("compressed-tensors", "ct-float8")),
        ("exl2", "exl2"),
    ],
)
def test_a_prepared_checkpoint_is_launched_with_its_flag(tmp_path: Path, method: str, stored_as: str) -> None:
    directory, _ = save_quantized(tmp_path, "llama", stored_as, hidden_size=64, intermediate_size=128)

    with serve("--quantize", method, "--model-id", str(directory)) as server:
        ids = server.token_ids("w1 w2 w3", max_new_tokens=4)
        engine = server.get("/info")["engine"]

    assert len(ids) == 4
    assert engine["quantize"] == method
    assert engine["kernels"][0] == "fused"
