"""The choice of a quantization method, and the refusal of impossible combinations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from reference_server.errors import UnsupportedError
from reference_server.model_server.quantization.schemes import Quantization, choose


def chosen(name: str | None, tmp_path: Path, settings: dict[str, Any] | None = None) -> Quantization | None:
    config = {} if settings is None else {"quantization_config": settings}
    return choose(name, config, tmp_path, tier="ragged", device=torch.device("cpu"), dummy=False)


GPTQ = {"quant_method": "gptq", "bits": 4}
AWQ = {"quant_method": "awq", "bits": 4}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        (None, GPTQ, "gptq"), (None, AWQ, "awq"), (None, {"quant_method": "fp8"}, "fp8"),
        (None, {"quant_method": "fbgemm_fp8"}, "fp8"), (None, CT, "compressed-tensors"),
        ("marlin", GPTQ, "marlin"), ("gptq", AWQ, "gptq"), ("fp8", None, "fp8"), ("eetq", None, "eetq"),
        ("bitsandbytes-nf4", None, "bitsandbytes-nf4"), (None, {"quant_method": "exl2", "bits": 4.25}, "exl2"),
    ],
)  # fmt: skip
def test_flag_and_checkpoint_decide_the_method(
    tmp_path: Path, name: str | None, settings: dict[str, Any] | None, expected: str
) -> None:
    quantization = chosen(name, tmp_path, settings)

    assert quantization is not None
    assert quantization.scheme.name == expected


def test_a_plain_checkpoint_without_the_flag_is_not_quantized(tmp_path: Path) -> None:
    assert chosen(None, tmp_path) is None


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        (
            "gptq",
            None,
            "`--quantize gptq` needs a checkpoint that is quantized with it.*plain checkpoints work with eetq, int4",
        ),
        ("compressed-tensors", None, "needs a checkpoint that is quantized with it"),
        ("eetq", GPTQ, "`--quantize eetq` does not work with a checkpoint that is quantized with gptq: remove it"),
        ("awq", GPTQ, "quantized with gptq: remove it"),
        ("exl2", None, "`--quantize exl2` needs a checkpoint that is quantized with it"),
        ("gptq", {"quant_method": "exl2"}, "`--quantize gptq` does not work with .* quantized with exl2"),
        (None, {"quant_method": "hqq"}, "the checkpoint is quantized with 'hqq', which is not supported"),
        (None, GPTQ | {"bits": 3}, "weights of 3 bits are not supported: only of 2, 4, 8"),
        (None, GPTQ | {"checkpoint_format": "marlin"}, "GPTQ weights in the 'marlin' layout are not supported"),
        (None, AWQ | {"version": "gemv"}, "AWQ weights in the 'gemv' layout are not supported"),
        (
            None,
            CT | {"quantization_status": "calibration"},
            "the status .* is calibration, must be compressed or frozen",
        ),
        (None, CT | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' format are not supported"),
    ],
)
def test_impossible_combinations_are_refused(
    tmp_path: Path, name: str | None, settings: dict[str, Any] | None, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        chosen(name, tmp_path, settings)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(UnsupportedError, match=r"needs bitsandbytes: pip install 'tgi-bench\[quantization\]'"):
        chosen("bitsandbytes", tmp_path)
