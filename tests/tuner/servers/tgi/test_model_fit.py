import pytest

from reference_server.launcher.model_facts import read_model_config
from tests.tuner.servers.tgi.test_parameter_count import LLAMA_2_7B, LLAMA_3_70B
from tuner.errors import ModelSizeError
from tuner.servers.tgi.gpu_memory import GPUS, find_gpu
from tuner.servers.tgi.model_fit import GpuGroup, fits, largest_prefill, read_config, size_of
from tuner.servers.tgi.weight_methods import METHODS

A10G = GPUS["a10g"]
METHOD = {method.name: method for method in METHODS}


def llama_3_8b():
    return dict(read_model_config("preset:llama-3.1-8b") or {})


def bloom_560m():
    return dict(read_model_config("preset:bloom-560m") or {})


@pytest.mark.parametrize(
    ("config", "kv_bytes"), [(LLAMA_2_7B, 524_288), (llama_3_8b(), 131_072), (bloom_560m(), 98_304)]
)
def test_the_bytes_of_a_tokens_keys_and_values(config, kv_bytes):
    assert size_of(config).kv_bytes_per_token() == kv_bytes


@pytest.mark.parametrize(
    ("config", "method", "weight_bytes"),
    [
        (LLAMA_2_7B, "none", 13_476_831_232),
        (llama_3_8b(), "none", 16_060_522_496),
        (bloom_560m(), "none", 1_118_429_184),
        ({**bloom_560m(), "dtype": "float32"}, "none", 2_236_858_368),
        # Embedding and head keep two bytes a parameter; the 6,979,321,856 of the layers' linears have fewer.
        (llama_3_8b(), "eetq", 9_081_200_640),
        (llama_3_8b(), "gptq", 5_809_643_520),
        # Only the MLPs of 30 of 32 layers.
        (llama_3_8b(), "fp8", 10_775_699_456),
    ],
)
def test_the_bytes_of_the_weights(config, method, weight_bytes):
    assert size_of(config).weight_bytes(METHOD[method]) == weight_bytes


def test_four_gpus_hold_a_quarter_of_the_matrices_and_of_the_kv_heads():
    size = size_of(llama_3_8b())

    assert size.weight_bytes(METHOD["none"], 4) == 4_015_529_984
    assert size.kv_bytes_per_token(4) == 32_768


def test_with_more_gpus_than_kv_heads_each_holds_one_head():
    size = size_of(llama_3_8b())

    assert size.kv_bytes_per_token(8) == size.kv_bytes_per_token(16) == 16_384
    # A sixteenth of the rest, an eighth of the keys and values.
    assert size.weight_bytes(METHOD["none"], 16) == 1_037_836_288


@pytest.mark.parametrize("count", [3, 12, 64])
def test_heads_that_cannot_be_divided_are_refused_with_counts_that_can(count):
    with pytest.raises(ModelSizeError, match=f"8 K/V heads cannot be divided over {count} GPUs: use 1, 2, 4, 8, 16"):
        fits(llama_3_8b(), GpuGroup(A10G, count))


def test_kv_tokens_fill_the_memory_that_weights_and_prefill_leave():
    (row, *_) = fits(LLAMA_2_7B, GpuGroup(A10G, prefill_tokens=4096))

    # 23,028 MiB x 0.9 - 1 GiB - 13,476,831,232 - 4,096 x 99,072 bytes, over 524,288 bytes.
    assert row.kv_tokens == 12_923
    assert row.requests_of(1200) == 10


def test_a_smaller_fraction_leaves_fewer_tokens():
    group = GpuGroup(A10G, memory_fraction=0.9, prefill_tokens=4096)

    # A tenth of 23,028 MiB x 0.9 less.
    assert fits(LLAMA_2_7B, group)[0].kv_tokens == 8_778


def test_a_70b_model_on_four_a10g_needs_quantized_weights():
    rows = {row.method.name: row for row in fits(LLAMA_3_70B, GpuGroup(A10G, 4))}

    fitting = {name for name, row in rows.items() if row.refusal is None}
    assert fitting == {
        *("eetq", "int4", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "gptq", "awq", "marlin"),
        "compressed-tensors",
    }
    assert rows["none"].refusal == "needs 13.6 GiB more on each GPU"
    assert rows["exl2"].refusal == "supports only one GPU"
    assert rows["gptq"].weight_bytes_per_gpu == 10_144_464_896
    assert 100_000 < rows["gptq"].kv_tokens < 130_000


def test_the_largest_prefill_is_the_launchers_default():
    # 4 x 125 teraflops over 147,639,500,800 operations a token.
    assert largest_prefill(LLAMA_3_70B, GpuGroup(A10G, 4), METHOD["gptq"]) == 3_386


def test_numbers_replace_those_of_a_model():
    config = read_config("preset:llama-3.1-8b", {"num_hidden_layers": 2})

    assert size_of(config).num_layers == 2
    assert size_of(read_config(None, LLAMA_2_7B)).num_kv_heads == 32


def test_a_model_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelSizeError, match="could not read the config"):
        read_config(str(tmp_path), {})


def test_a_gpu_is_known_by_its_name_or_its_memory():
    assert find_gpu("h100").memory_mib == 81_559
    assert find_gpu("12.5GiB").memory_mib == 12_800
    for text in ("a1000", "24", "0GiB", "nanGiB", "infGiB"):
        with pytest.raises(ModelSizeError, match=text):
            find_gpu(text)
