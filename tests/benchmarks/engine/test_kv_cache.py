"""The comparison of K/V caches: what it measures of a small model, and its table."""

import pytest

from benchmarks.engine.kv_cache import CachePlan, CacheResult, DecodeSpeed, measure, table


@pytest.mark.slow
def test_three_caches_of_a_model_are_measured_in_turns() -> None:
    plan = CachePlan(rows=(2,), contexts=(40,), rounds=2, steps=2, text_tokens=512)

    plain, *rounded = measure("tiny-llama", plan)

    assert [plain.cache, *(each.cache for each in rounded)] == ["bfloat16", "fp8_e4m3fn", "fp8_e5m2"]
    assert plain.kl_per_token == 0
    assert [each.tokens_per_gib for each in rounded] == [2 * plain.tokens_per_gib] * 2
    assert 0 < rounded[0].kl_per_token < rounded[1].kl_per_token < 0.02
    assert all(len(each.speeds[0].tokens_per_s) == len(each.speeds[0].times_bfloat16) == 2 for each in rounded)


def test_the_table_has_capacity_divergence_and_the_ratio_of_each_shape() -> None:
    speed = DecodeSpeed(8, 4096, [30.0, 20.0, 25.0], [1.25, 1.5, 1.0])
    result = CacheResult("tiny-llama", "fp8_e5m2", "compiled attention, fused", 2048, 512, 0.005, 2.2, [speed])

    lines = table([result]).splitlines()

    assert "2,048 tokens in 1 GiB; KL 0.005000 per token, perplexity 2.2000 (n=512 tokens)" in lines[2]
    assert lines[3] == (
        "  8 rows of 4096 tokens: 25.0 (20.0 - 30.0) tokens/s, 1.25 (1.00 - 1.50) x bfloat16, n=3, higher is better"
    )
