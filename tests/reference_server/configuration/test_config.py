import pydantic
import pytest

from reference_server.configuration.config import RouterConfig, ServerConfig, ShardConfig
from reference_server.configuration.config_fields import tunables
from reference_server.configuration.config_support import refuse_unsupported, unsupported_settings
from reference_server.errors import UnsupportedError

TUNABLE = {
    "max_batch_prefill_tokens", "max_waiting_tokens", "prefill_chunking", "cuda_memory_fraction", "quantize",
    "waiting_served_ratio", "max_batch_size", "max_batch_total_tokens", "max_concurrent_requests", "cuda_graphs",
    "kv_cache_dtype", "speculate", "num_shard",
}  # fmt: skip


def test_an_empty_server_config_is_valid_and_served() -> None:
    assert unsupported_settings(ServerConfig()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_input_tokens": 8, "max_input_length": 8}, "are the same setting"),
        ({"max_input_tokens": 1024, "max_total_tokens": 1024}, "`max_input_tokens` must be < `max_total_tokens`"),
        ({"max_input_length": 1024, "max_total_tokens": 1024}, "`max_input_tokens` must be < `max_total_tokens`"),
        (
            {"max_total_tokens": 64, "max_batch_total_tokens": 32},
            "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 64 and 32",
        ),
        (
            {"max_batch_prefill_tokens": 64, "max_batch_total_tokens": 32},
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: 64 and 32",
        ),
        (
            {"max_batch_prefill_tokens": 64, "max_input_tokens": 100, "prefill_chunking": False},
            "`max_batch_prefill_tokens` must be >= `max_input_tokens`",
        ),
        ({"max_batch_size": 0}, "`max_batch_size` must be > 0"),
        ({"validation_workers": 0}, "`validation_workers` must be > 0"),
        ({"quantize": "fp8", "dtype": "float16"}, "leave one out"),
        ({"quantize": "exl2", "num_shard": 2}, "exl2 cannot be sharded"),
        ({"sharded": True, "num_shard": 1}, "`sharded` is true but `num_shard` is 1"),
        ({"num_shard": 0}, "`num_shard` is 0"),
        ({"ngrok": True}, "`ngrok` needs"),
        ({"no_shards": True}, "only work together"),
        ({"shard_addr": "127.0.0.1:1"}, "only work together"),
        ({"shard_addr": "127.0.0.1:1", "no_shards": True, "transport": "link"}, "`transport` link needs unix sockets"),
        ({"grpc_schema": "v2", "transport": "link"}, "`transport` link needs `grpc_schema` v3"),
        ({"grpc_schema": "v2", "lora_adapters": ("preset:exclaim",)}, "need `grpc_schema` v3"),
        ({"grpc_schema": "v2", "adapter_directory": "adapters"}, "need `grpc_schema` v3"),
        ({"node_rank": 1}, "`node_rank` is 1 but `num_nodes` is 1"),
        ({"num_nodes": 2}, "`num_nodes` needs `master_addr`, and `shard_addr`"),
        ({"num_nodes": 2, "master_addr": "a"}, "`num_nodes` needs `master_addr`, and `shard_addr`"),
        ({"attention": "paged", "prefix_caching": True}, "does not work with `attention` paged"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="Value error") as caught:
        ServerConfig.model_validate(settings)

    assert message in str(caught.value)


def test_bitsandbytes_goes_with_a_dtype() -> None:
    assert ServerConfig(quantize="bitsandbytes-nf4", dtype="float16").dtype == "float16"


def test_chunked_prefill_lifts_the_rule_that_a_prompt_fits_one_prefill() -> None:
    config = ServerConfig(max_batch_prefill_tokens=64, max_input_tokens=100)

    assert config.prefill_chunking


def test_tunable_fields_have_the_kinds_a_search_space_knows() -> None:
    kinds = {name: tunable.kind for name, tunable in tunables(ServerConfig).items()}

    assert set(kinds) == TUNABLE
    assert kinds["max_batch_prefill_tokens"] == "int"
    assert kinds["cuda_memory_fraction"] == "float"
    assert kinds["quantize"] == "choice"
    assert kinds["prefill_chunking"] == "bool"


def test_secrets_are_not_shown_and_not_in_argv() -> None:
    config = ServerConfig.model_validate({"api_key": "hunter2", "hub_token": "hf_x"})

    assert "hunter2" not in repr(config) + str(config) + config.model_dump_json() + " ".join(config.to_argv())
    assert config.to_environ() == {"API_KEY": "hunter2", "HF_TOKEN": "hf_x"}


def test_a_part_takes_the_settings_of_another_command() -> None:
    config = ServerConfig(port=8080, max_input_tokens=10, model_id="preset:tiny-llama")

    router = config.part(RouterConfig, master_shard_uds_path="/run/s-0")
    shard = config.part(ShardConfig, uds_path="/run/s", sharded=False)

    assert router.to_argv() == ["--max-input-tokens", "10", "--port", "8080", "--master-shard-uds-path", "/run/s-0"]
    assert shard.to_argv() == ["preset:tiny-llama", "--max-input-tokens", "10", "--uds-path", "/run/s"]


@pytest.mark.parametrize(
    "setting",
    [
        {"check_invariants": True},
        {"attention": "flashdecoding-ipex"},
    ],
)  # fmt: skip
def test_a_setting_that_is_not_served_is_refused_by_name(setting: dict[str, object]) -> None:
    flag = "--" + next(iter(setting)).replace("_", "-")

    with pytest.raises(UnsupportedError, match=flag):
        refuse_unsupported(ServerConfig.model_validate(setting))


@pytest.mark.parametrize(
    "setting",
    [{"speculate": 2}, {"cuda_graphs": "1,2"}, {"run_ahead": False}, {"attention": "paged"}, {"attention": "triton"}],
)
def test_the_values_that_work_are_not_refused(setting: dict[str, object]) -> None:
    refuse_unsupported(ServerConfig.model_validate(setting))
