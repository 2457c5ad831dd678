"""docs/support.md equals the tables; its cells are tested here or in tests/families."""

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from reference_server.configuration.config import ServerConfig, ShardConfig
from reference_server.configuration.config_support import unsupported_settings
from reference_server.configuration.model_config import Quantize
from reference_server.errors import UnsupportedError
from reference_server.model_server.device import choose_device
from reference_server.model_server.models.families import FAMILIES, REFUSED, ModelFamily, find_family
from reference_server.model_server.quantization.schemes import SCHEMES, choose
from reference_server.model_server.support_page import quantization_of, render_page, sharding_of
from tests.families import test_sharded

PAGE = Path(__file__).parents[3] / "docs" / "support.md"


def test_the_page_is_the_output_of_make_docs() -> None:
    assert PAGE.read_text() == "\n".join(render_page()) + "\n"


def test_every_sharded_family_is_in_the_sharding_tests() -> None:
    tested = {test_sharded.CONFIGS[name]["model_type"] for name in test_sharded.AT_TWO}

    # test_sharded.py tests the refusal of the others.
    assert {family.model_type for family in FAMILIES if sharding_of(family) == "served"} == tested


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_is_refused_with_the_reason_on_the_page(model_type: str) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED[model_type].partition(":")[0]):
        find_family({"model_type": model_type})


@pytest.mark.parametrize("method", get_args(Quantize))
def test_sharded_quantization_methods_are_those_of_the_page(method: str) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{method}` |"))
    sharded = {"model_id": "m", "quantize": method, "num_shard": 2}

    assert unsupported_settings(ShardConfig.model_validate({"model_id": "m", "quantize": method})) == []
    if "| refused" in row:
        with pytest.raises(ValidationError, match=f"`quantize` {method} cannot be sharded"):
            ServerConfig.model_validate(sharded)
    else:
        assert ServerConfig.model_validate(sharded).num_shard == 2


@pytest.mark.parametrize(("name", "is_unused"), [("mps", True), ("xpu", False), ("hpu", False)])
def test_other_accelerators_are_unused_or_refused(monkeypatch: pytest.MonkeyPatch, name: str, is_unused: bool) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: SimpleNamespace(type=name))

    if is_unused:
        assert choose_device().type == "cpu"
        return
    with pytest.raises(UnsupportedError, match=f"the accelerator '{name}' is not supported"):
        choose_device()


def test_every_method_has_a_scheme_and_every_scheme_a_flag() -> None:
    assert {scheme.name for scheme in SCHEMES} == set(get_args(Quantize))


@pytest.mark.parametrize("family", [each for each in FAMILIES if quantization_of(each) != "served"])
def test_a_family_that_is_not_quantized_is_refused(tmp_path: Path, family: ModelFamily) -> None:
    with pytest.raises(UnsupportedError, match="`--quantize eetq` is not supported for recurrent models"):
        choose("eetq", {}, tmp_path, tier=family.tier, device=torch.device("cpu"), dummy=False)
