"""The prediction of two replicas under shared prefixes, from costs written by hand."""

import pytest

from benchmarks.tuner.two_replicas import load_settings, predicted
from tuner.simulator.fitting.cost_file import Costs
from tuner.simulator.fitting.cost_model import CostModel
from tuner.simulator.simulated_server import SimulatedServer

# Room for 40 of the 64 prefixes of 512 tokens.
OPTIONS = {"max_batch_prefill_tokens": 1024, "max_batch_total_tokens": 40 * 512}
COSTS = Costs(
    {"none": CostModel({"prefill": 1e7, "tokens": 1e5, "decode": 5e6, "rows": 1e6})},
    (SimulatedServer({**OPTIONS, "use_prefix_caching": True, "supports_chunking": True}, {}),),
)


@pytest.mark.slow
def test_a_hash_of_the_prefix_raises_the_cached_share_of_two_replicas():
    settings = load_settings(rate=8, duration_s=30, seed=1)

    by_load, by_prefix = (predicted(policy, settings, COSTS) for policy in ("least_loaded", "prefix_hash"))

    assert by_prefix["cached_share"] > 1.2 * by_load["cached_share"]
    assert by_prefix["ttft_p50_ms"] < by_load["ttft_p50_ms"]
