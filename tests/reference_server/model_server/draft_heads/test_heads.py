"""Draft heads compute what their papers say, from TGI's layouts, and refuse checkpoints of another base model."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from reference_server.errors import ArgumentError, StartupError
from reference_server.model_server.draft_heads.base_model import BaseModel
from reference_server.model_server.draft_heads.heads import DraftHeads, load_heads, num_drafted
from tests.support.models.checkpoints.saved_heads import save_medusa, save_mlp_speculator

VOCAB, HIDDEN, ROWS = 37, 16, 5
SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN}


def tensors(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


OUTPUT = tensors((VOCAB, HIDDEN), 1)
BASE = BaseModel(HIDDEN, VOCAB, lambda hidden: hidden @ OUTPUT.T)
STATES, NEWEST = tensors((ROWS, HIDDEN), 2), torch.tensor([3, 1, 4, 1, 5])


def loaded(directory: Path, base: BaseModel = BASE, dtype: torch.dtype = torch.float32) -> DraftHeads:
    return load_heads(directory, base, dtype, torch.device("cpu"))


def assert_chosen(heads: DraftHeads, expected: list[Tensor]) -> None:
    """expected: the logits of each head, [rows, vocab_size]."""
    ids, logprobs = heads.guess(STATES, NEWEST, len(expected))

    best = [logits.log_softmax(-1).max(-1) for logits in expected]
    assert ids.tolist() == torch.stack([each.indices for each in best], 1).tolist()
    assert torch.allclose(logprobs, torch.stack([each.values for each in best], 1), atol=1e-5)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("count", [1, 3])
def test_medusa_v1(tmp_path: Path, num_layers: int, count: int) -> None:
    save_medusa(tmp_path, tmp_path, **SIZES, num_layers=num_layers)
    weights = load_file(tmp_path / "medusa_lm_head.safetensors")
    expected = []
    for head in range(count):
        state = STATES
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            state = state + F.silu(F.linear(state, weights[f"{name}.weight"], weights[f"{name}.bias"]))
        expected.append(state @ weights[f"{head}.{num_layers}.weight"].T)

    heads = loaded(tmp_path)

    assert heads.name == "medusa-v1"
    assert_chosen(heads, expected)


@pytest.mark.parametrize("count", [1, 3])
def test_medusa_v2_has_the_output_head_of_its_base_model(tmp_path: Path, count: int) -> None:
    save_medusa(tmp_path, tmp_path, **SIZES, version=2)
    weights = load_file(tmp_path / "medusa_lm_head.safetensors")
    blocks = [(weights[f"{head}.0.linear.weight"], weights[f"{head}.0.linear.bias"]) for head in range(count)]

    heads = loaded(tmp_path)

    assert heads.name == "medusa-v2"
    assert_chosen(heads, [(STATES + F.silu(F.linear(STATES, *block))) @ OUTPUT.T for block in blocks])


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_mlp_speculator(tmp_path: Path, count: int, tied: bool, scale_input: bool) -> None:
    save_mlp_speculator(tmp_path, tmp_path, **SIZES, inner_dim=8, tied=tied, scale_input=scale_input)
    weights = load_file(tmp_path / "model.safetensors")
    state_weight = 0.5 ** (0.5 / 3)
    token_weight = math.sqrt(1 - state_weight**2) * math.sqrt(8 / 2)
    state, ids, expected = STATES, NEWEST, []
    if scale_input:
        state = state / (state.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(2)
    for head in range(count):
        own, project = (0, min(head, 1)) if tied else (head, head)
        token = weights[f"speculator.emb.{own}.weight"][ids] * token_weight
        state = state @ weights[f"speculator.proj.{project}.weight"].T * state_weight + token
        normed = state / (state.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        state = F.gelu(normed * weights[f"speculator.ln.{own}.weight"] + weights[f"speculator.ln.{own}.bias"])
        expected.append(state @ weights[f"speculator.head.{own}.weight"].T)
        ids = expected[-1].argmax(-1)

    heads = loaded(tmp_path)

    assert heads.name == "mlp-speculator"
    assert_chosen(heads, expected)


def test_pickled_heads_are_read_as_tensors(tmp_path: Path) -> None:
    save_medusa(tmp_path, tmp_path, **SIZES)
    saved = tmp_path / "medusa_lm_head.safetensors"
    expected, _ = loaded(tmp_path).guess(STATES, NEWEST, 3)
    torch.save(load_file(saved), tmp_path / "medusa_lm_head.pt")
    saved.unlink()

    found, _ = loaded(tmp_path).guess(STATES, NEWEST, 3)

    assert found.tolist() == expected.tolist()


def test_heads_count_in_bytes_of_the_compute_type(tmp_path: Path) -> None:
    save_medusa(tmp_path, tmp_path, **SIZES)

    expected = 3 * (HIDDEN * HIDDEN + HIDDEN + VOCAB * HIDDEN)

    assert loaded(tmp_path).weight_bytes == 4 * expected
    assert loaded(tmp_path, dtype=torch.bfloat16).weight_bytes == 2 * expected


def test_heads_of_another_base_model_are_refused_with_the_weight(tmp_path: Path) -> None:
    save_medusa(tmp_path / "medusa", tmp_path, **SIZES)
    save_mlp_speculator(tmp_path / "mlp", tmp_path, **SIZES)
    wider, larger = BaseModel(HIDDEN + 2, VOCAB, BASE.head), BaseModel(HIDDEN, VOCAB + 1, BASE.head)

    with pytest.raises(StartupError, match=r"0\.0\.linear\.weight has shape \(16, 16\), expected \(18, 18\)"):
        loaded(tmp_path / "medusa", wider)
    with pytest.raises(StartupError, match=r"0\.1\.weight has shape \(37, 16\), expected \(38, 16\)"):
        loaded(tmp_path / "medusa", larger)
    with pytest.raises(StartupError, match=r"speculator\.proj\.0\.weight has shape"):
        loaded(tmp_path / "mlp", wider)


def test_a_head_that_the_config_names_and_the_file_lacks_is_refused(tmp_path: Path) -> None:
    save_medusa(tmp_path, tmp_path, **SIZES)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"medusa_num_heads": 3', '"medusa_num_heads": 4'))

    with pytest.raises(StartupError, match=r"weight 3\.0\.linear\.weight is missing"):
        loaded(tmp_path)


@pytest.mark.parametrize("value", ["0", "65", '"3"', "true", "null"])
def test_a_wrong_number_of_heads_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"medusa_num_heads": {value}, "medusa_num_layers": 1}}')

    with pytest.raises(StartupError, match=r"`medusa_num_heads` is .*, but must be an integer from 1 to 64"):
        num_drafted(tmp_path, None)


@pytest.mark.parametrize("kind", ["medusa", "mlp"])
def test_an_unset_speculate_is_all_heads_and_more_than_these_are_refused(tmp_path: Path, kind: str) -> None:
    save = save_medusa if kind == "medusa" else save_mlp_speculator
    save(tmp_path, tmp_path, **SIZES)

    assert [num_drafted(tmp_path, speculate) for speculate in (None, 0, 2, 3)] == [3, 0, 2, 3]
    with pytest.raises(ArgumentError, match=r"`--speculate 4` needs 4 heads, but the speculator has 3"):
        num_drafted(tmp_path, 4)
    assert [num_drafted(None, speculate) for speculate in (None, 0, 5)] == [0, 0, 5]
