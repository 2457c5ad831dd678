"""Which method a model is served with; what cannot be is refused by name, with what would work."""

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
    ("name", "settings", "served_as"),
    [
        (None, GPTQ, "gptq"), (None, AWQ, "awq"), (None, {"quant_method": "fp8"}, "fp8"),
        (None, {"quant_method": "fbgemm_fp8"}, "fp8"), (None, CT, "compressed-tensors"),
        ("marlin", GPTQ, "marlin"), ("gptq", AWQ, "gptq"), ("fp8", None, "fp8"), ("eetq", None, "eetq"),
        ("bitsandbytes-nf4", None, "bitsandbytes-nf4"), (None, {"quant_method": "exl2", "bits": 4.25}, "exl2"),
    ],
)  # fmt: skip
def test_flag_and_checkpoint_give_a_method(
    tmp_path: Path, name: str | None, settings: dict[str, Any] | None, served_as: str
) -> None:
    quantization = chosen(name, tmp_path, settings)

    assert quantization is not None
    assert quantization.scheme.name == served_as


def test_a_plain_checkpoint_without_the_flag_stays_plain(tmp_path: Path) -> None:
    assert chosen(None, tmp_path) is None


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("gptq", None, "`--quantize gptq` needs a checkpoint that is quantized so.*works on any checkpoint: eetq, fp8"),
        ("compressed-tensors", None, "needs a checkpoint that is quantized so"),
        ("eetq", GPTQ, "`--quantize eetq` cannot be had on a checkpoint that is quantized with gptq already"),
        ("awq", GPTQ, "quantized with gptq already"),
        ("exl2", None, "`--quantize exl2` needs a checkpoint that is quantized so"),
        ("gptq", {"quant_method": "exl2"}, "`--quantize gptq` cannot be had on .* quantized with exl2 already"),
        (None, {"quant_method": "hqq"}, "the checkpoint is quantized with 'hqq', which is not served"),
        (None, GPTQ | {"bits": 3}, "weights of 3 bits are not served: only of 2, 4, 8"),
        (None, GPTQ | {"checkpoint_format": "marlin"}, "GPTQ weights in the 'marlin' layout are not read"),
        (None, AWQ | {"version": "gemv"}, "AWQ weights in the 'gemv' layout are not read"),
        (None, CT | {"quantization_status": "calibration"}, "served when it is finished, and this one is calibration"),
        (None, CT | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' format are not read"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, name: str | None, settings: dict[str, Any] | None, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        chosen(name, tmp_path, settings)


def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(UnsupportedError, match=r"needs bitsandbytes: pip install 'tgi-bench\[quantization\]'"):
        chosen("bitsandbytes", tmp_path)
