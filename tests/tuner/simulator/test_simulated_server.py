"""The K/V pool of a server with other settings."""

import pytest

from tuner.simulator.simulated_server import GIB, KvPool, SimulatedServer

MEMORY_GIB, BYTES_PER_TOKEN, PEAK_PER_TOKEN = 0.02, 1024, 4224
WEIGHTS = {"none": 800_000, "eetq": 400_000}


def launched(
    budget: int,
    share: float,
    quantize: str = "none",
    *,
    is_cpu: bool = True,
    with_bytes: bool = True,
    cache: str | None = None,
) -> SimulatedServer:
    """A launch of a server that divides its memory as the warm-up does."""
    peak = PEAK_PER_TOKEN * budget
    bytes_per_token = BYTES_PER_TOKEN if cache in (None, "auto") else BYTES_PER_TOKEN / 2
    tokens = int((share * MEMORY_GIB * GIB - WEIGHTS[quantize] - peak) / bytes_per_token)
    settings = {"cuda_memory_fraction": share, "quantize": quantize, "kv_cache_dtype": cache}
    return SimulatedServer(
        {"max_batch_prefill_tokens": budget, "max_batch_total_tokens": tokens},
        {**settings, "cpu_memory_gib": MEMORY_GIB} if is_cpu else settings,
        {"weight_bytes": WEIGHTS[quantize], "prefill_peak_bytes": peak} if with_bytes else {},
    )


WANTED = {"max_batch_prefill_tokens": 512, "cuda_memory_fraction": 0.7, "quantize": "none"}
TRUE_TOKENS = launched(512, 0.7).options["max_batch_total_tokens"]


@pytest.mark.parametrize(
    "launches",
    [
        [launched(4096, 1.0)],
        [launched(4096, 1.0), launched(2048, 0.9, "eetq")],
        [launched(4096, 1.0, is_cpu=False), launched(2048, 0.9, is_cpu=False)],
        [
            launched(4096, 1.0, with_bytes=False),
            launched(2048, 0.9, with_bytes=False),
            launched(1024, 0.9, with_bytes=False),
        ],
    ],
    ids=["one_on_a_cpu", "two_schemes", "a_device_of_unknown_size", "without_bytes"],
)
def test_the_kv_pool_follows_memory_fraction_and_prefill_budget(launches: list[SimulatedServer]):
    assert KvPool.of(launches).tokens(WANTED) == pytest.approx(TRUE_TOKENS, rel=0.01)


@pytest.mark.parametrize("with_bytes", [True, False])
@pytest.mark.parametrize("measured", [None, "fp8_e5m2"])
@pytest.mark.parametrize("wanted", ["auto", "fp8_e4m3fn"])
def test_an_eight_bit_cache_holds_twice_the_tokens(with_bytes: bool, measured: str | None, wanted: str):
    launches = [
        launched(*each, with_bytes=with_bytes, cache=measured) for each in ((4096, 1.0), (2048, 0.9), (1024, 0.9))
    ]

    found = KvPool.of(launches).tokens({**WANTED, "kv_cache_dtype": wanted})

    assert found == pytest.approx(launched(512, 0.7, cache=wanted).options["max_batch_total_tokens"], rel=0.01)


def test_a_prefill_budget_that_needs_all_memory_leaves_no_kv_pool():
    assert KvPool.of([launched(4096, 1.0)]).tokens({**WANTED, "max_batch_prefill_tokens": 8192}) == 0


def test_an_unset_setting_keeps_the_servers_value():
    server = launched(4096, 1.0)

    changed = server.with_settings({"max_batch_prefill_tokens": None, "cuda_memory_fraction": 1.0}, KvPool.of([server]))

    assert changed.options["max_batch_total_tokens"] == pytest.approx(server.options["max_batch_total_tokens"], abs=2)
