"""GPTQ rounding: output errors against rounding to nearest and against brute force."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reference_server.model_server.gptq.round_weight import GPTQSettings, Hessian, round_weight

INPUTS, OUTPUTS, GROUP = 96, 16, 32


def correlated(inputs: int, rows: int = 2048) -> Tensor:
    """Correlated inputs of very different magnitude, like activations: [rows, inputs]."""
    generator = torch.Generator().manual_seed(2)
    mixed = torch.randn(inputs, inputs, generator=generator) * torch.logspace(0, -1.5, inputs)[:, None]
    return torch.randn(rows, inputs, generator=generator) @ mixed


def case(inputs: int = INPUTS, outputs: int = OUTPUTS) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, their Hessian, and a weight [outputs, inputs]."""
    rows = correlated(inputs)
    hessian = Hessian(inputs, torch.device("cpu"))
    hessian.add(rows)
    return rows, hessian.mean(), torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(4))


def error(rows: Tensor, weight: Tensor, hessian: Tensor, settings: GPTQSettings) -> float:
    """Relative error of the outputs."""
    rounded = round_weight(weight, hessian, settings).dequantize(torch.float32)
    return ((rows @ (rounded - weight).t()).norm() / (rows @ weight.t()).norm()).item()


SETTINGS = {
    "four bits": GPTQSettings(group_size=GROUP),
    "asymmetric": GPTQSettings(group_size=GROUP, symmetric=False),
    "two bits": GPTQSettings(2, group_size=GROUP),
    "eight bits": GPTQSettings(8, group_size=GROUP),
    "one group": GPTQSettings(group_size=-1),
    "act-order": GPTQSettings(group_size=GROUP, act_order=True),
    "act-order, one group": GPTQSettings(group_size=-1, act_order=True),
    "static groups": GPTQSettings(group_size=GROUP, act_order=True, static_groups=True),
    "a last group that is shorter": GPTQSettings(group_size=40),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_output_errors_are_much_smaller_than_with_rounding_to_nearest(settings: GPTQSettings) -> None:
    rows, hessian, weight = case()

    ours, nearest = error(rows, weight, hessian, settings), error(rows, weight, torch.eye(INPUTS), settings)

    assert 0 < ours < 0.65 * nearest


def test_errors_of_earlier_blocks_of_inputs_are_compensated() -> None:
    """More inputs than the 128 of one block."""
    rows, hessian, weight = case(inputs=192)
    settings = GPTQSettings(group_size=GROUP)

    ours, nearest = error(rows, weight, hessian, settings), error(rows, weight, torch.eye(192), settings)

    assert 0 < ours < 0.65 * nearest


def test_an_identity_hessian_gives_rounding_to_nearest() -> None:
    weight = case()[2]

    rounded = round_weight(weight, torch.eye(INPUTS), GPTQSettings(group_size=GROUP))

    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) * 2 / 15).half().float()
    expected = (groups / scales[..., None]).round().clamp(-8, 7) * scales[..., None]
    assert torch.equal(rounded.scales, scales)
    assert torch.allclose(rounded.dequantize(torch.float32), expected.flatten(1), atol=1e-6)


def test_the_second_of_two_columns_gets_the_best_of_all_codes() -> None:
    rows, hessian, weight = case(inputs=2, outputs=8)
    settings = GPTQSettings(group_size=1, damping=1e-6)

    rounded = round_weight(weight, hessian, settings)

    first, second = rounded.dequantize(torch.float32).t()
    for output in range(8):
        scale = rounded.scales[output, 1]
        first_error = rows @ torch.stack([first[output] - weight[output, 0], torch.zeros(())])
        losses = [(first_error + rows[:, 1] * ((code - 8) * scale - weight[output, 1])).norm() for code in range(16)]
        chosen = (first_error + rows[:, 1] * (second[output] - weight[output, 1])).norm()
        assert chosen <= min(losses) * (1 + 1e-4)


def test_act_order_lowers_the_error_for_inputs_of_different_magnitude() -> None:
    rows, hessian, weight = case()
    spread = torch.logspace(-1, 1, INPUTS)[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))]
    rows, hessian = rows * spread, hessian * spread * spread[:, None]
    plain = GPTQSettings(group_size=GROUP)

    as_they_come, ordered, static = (
        error(rows, weight, hessian, settings)
        for settings in (plain, replace(plain, act_order=True), replace(plain, act_order=True, static_groups=True))
    )

    assert ordered < as_they_come
    assert static < as_they_come


def test_groups_have_neighbouring_inputs_or_inputs_of_similar_magnitude() -> None:
    _, hessian, weight = case()
    by_size = hessian.diagonal().argsort(descending=True, stable=True)

    for act_order, static in itertools.product((False, True), repeat=2):
        settings = GPTQSettings(group_size=GROUP, act_order=act_order, static_groups=static)
        group_of = round_weight(weight, hessian, settings).group_of

        neighbours = torch.arange(INPUTS) // GROUP
        expected = neighbours if static or not act_order else torch.empty(INPUTS, dtype=torch.int64)
        if act_order and not static:
            expected[by_size] = neighbours
        assert torch.equal(group_of, expected)


def test_more_bits_smaller_groups_and_asymmetry_each_lower_the_error() -> None:
    rows, hessian, weight = case()
    weight = weight + 0.5

    bits = [error(rows, weight, hessian, GPTQSettings(bits, group_size=GROUP)) for bits in (2, 4, 8)]
    groups = [error(rows, weight, hessian, GPTQSettings(group_size=size)) for size in (-1, GROUP)]
    symmetric = [
        error(rows, weight, hessian, GPTQSettings(group_size=GROUP, symmetric=symmetric)) for symmetric in (True, False)
    ]

    assert bits == sorted(bits, reverse=True)
    assert groups == sorted(groups, reverse=True)
    assert symmetric == sorted(symmetric, reverse=True)


def test_zeros_are_at_least_one_when_all_weights_are_positive() -> None:
    rows, hessian, weight = case()

    rounded = round_weight(weight.abs() + 1, hessian, GPTQSettings(group_size=GROUP, symmetric=False))

    assert rounded.zeros.min() == 1
    assert rounded.zeros.max() <= 15
    assert ((rows @ (rounded.dequantize(torch.float32) - weight.abs() - 1).t()).norm() / rows.norm()) < 0.4


def test_weights_of_an_input_that_is_always_zero_become_zero() -> None:
    rows, _, weight = case()
    rows[:, 7] = 0
    hessian = Hessian(INPUTS, torch.device("cpu"))
    hessian.add(rows)

    rounded = round_weight(weight, hessian.mean(), GPTQSettings(group_size=GROUP)).dequantize(torch.float32)

    assert rounded.isfinite().all()
    assert not rounded[:, 7].any()


def test_a_group_of_zeros_stays_zero() -> None:
    weight = case()[2]
    weight[:, :GROUP] = 0

    for symmetric in (True, False):
        settings = GPTQSettings(group_size=GROUP, symmetric=symmetric)
        rounded = round_weight(weight, torch.eye(INPUTS), settings).dequantize(torch.float32)
        assert not rounded[:, :GROUP].any()


def test_a_singular_hessian_is_damped_until_it_is_positive_definite() -> None:
    rows = correlated(INPUTS)[:5]
    hessian = Hessian(INPUTS, torch.device("cpu"))
    hessian.add(rows)
    weight = case()[2]

    ours = error(rows, weight, hessian.mean(), GPTQSettings(group_size=GROUP, damping=1e-9))

    assert ours < 0.5 * error(rows, weight, torch.eye(INPUTS), GPTQSettings(group_size=GROUP))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight, hessian: weight.fill_(float("nan")), "not finite"),
        (lambda weight, hessian: hessian.fill_(float("inf")), "not finite"),
        (lambda weight, hessian: weight.mul_(1e6), "exceeds the range of float16"),
        (lambda weight, hessian: hessian.neg_(), "no damping"),
    ],
)
def test_a_weight_that_cannot_be_rounded_raises(change, message) -> None:
    _, hessian, weight = case()
    change(weight, hessian)

    with pytest.raises(ValueError, match=message):
        round_weight(weight, hessian, GPTQSettings(group_size=GROUP))


def test_a_hessian_is_the_mean_over_all_rows_however_they_come() -> None:
    rows = correlated(8, rows=64)
    whole, parts = Hessian(8, torch.device("cpu")), Hessian(8, torch.device("cpu"))

    whole.add(rows.view(4, 16, 8))
    parts.add(rows[:10])
    parts.add(rows[10:].to(torch.float64))

    assert torch.allclose(whole.mean(), parts.mean(), rtol=1e-5)
    assert torch.allclose(whole.mean(), 2 * rows.t() @ rows / 64, rtol=1e-5)


def test_a_group_size_that_was_not_given_divides_every_input() -> None:
    assert GPTQSettings().fitted([4096, 11008]).group_size == 128
    assert GPTQSettings().fitted([192, 384]).group_size == 64
    assert GPTQSettings().fitted([100]).group_size == -1
    assert GPTQSettings(group_size=128).fitted([192]).group_size == 128
