import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.configuration.config import DownloadConfig, RouterConfig, ServerConfig, ShardConfig
from reference_server.configuration.config_fields import flag_words, source_of
from reference_server.configuration.settings import load, load_rank, visible_devices
from reference_server.errors import ArgumentError

words = st.text(st.characters(codec="utf-8", exclude_characters=", \t\n\r\x00\x0b\x0c"), min_size=1).filter(
    lambda text: not any(character.isspace() for character in text)
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1)
positive = st.integers(1, 2**31)
fractions = st.floats(0.001, 0.999)
switches = st.booleans()

# Every field of the launcher with values that are valid alone.
VALUES: dict[str, st.SearchStrategy[object]] = {
    "model_id": texts, "quantize": st.sampled_from(["awq", "fp8", "bitsandbytes-nf4"]), "speculate": st.integers(0, 9),
    "dtype": st.sampled_from(["float16", "bfloat16", "float32"]), "load_format": st.sampled_from(["auto", "dummy"]),
    "kv_cache_dtype": st.sampled_from(["fp8_e4m3fn", "fp8_e5m2"]), "prefill_chunking": switches,
    "attention": st.sampled_from(["auto", "torch", "flashdecoding-ipex"]), "prefix_caching": switches,
    "run_ahead": switches, "cuda_graphs": st.lists(st.integers(0, 512), min_size=1), "cuda_memory_fraction": fractions,
    "cpu_memory_gib": st.floats(0.001, 1e6), "wiggle_room": fractions, "rope_factor": st.floats(1e-9, 1e9),
    "rope_scaling": st.sampled_from(["linear", "dynamic"]), "watermark_gamma": fractions,
    "watermark_delta": st.floats(-1e9, 1e9), "enable_prefill_logprobs": switches, "disable_custom_kernels": switches,
    "compiled_walk": switches, "speculate_adaptive": switches, "ngram_rule": st.sampled_from(["suffix", "tgi"]),
    "huggingface_hub_cache": words.map(Path), "weights_cache_override": words.map(Path), "config_file": st.none(),
    "revision": texts, "trust_remote_code": switches, "hub_token": texts, "json_output": switches, "log_level": texts,
    "max_input_tokens": positive, "max_total_tokens": positive, "max_batch_size": positive,
    "lora_adapters": st.lists(words), "otlp_endpoint": texts, "otlp_service_name": texts,
    "shard_addr": st.lists(words, max_size=0), "max_concurrent_requests": positive,
    "waiting_served_ratio": st.floats(0, 1e9), "max_batch_prefill_tokens": positive,
    "max_batch_total_tokens": positive, "max_waiting_tokens": positive, "max_best_of": positive,
    "max_stop_sequences": positive, "max_top_n_tokens": positive, "max_client_batch_size": positive,
    "max_requests_per_client": positive, "max_queue_time": st.floats(0.001, 1e9),
    "grpc_schema": st.sampled_from(["v2", "v3"]),
    "transport": st.sampled_from(["auto", "grpc", "link"]),
    "step_timeout": st.floats(0.001, 1e9), "step_trace": words.map(Path), "check_invariants": switches,
    "hostname": texts, "port": st.integers(0, 65535), "prometheus_port": st.integers(0, 65535), "api_key": texts,
    "api_key_file": words.map(Path), "shutdown_delay": st.floats(0, 1e9),
    "adapter_directory": words.map(Path), "adapter_memory_mib": positive, "max_adapters": st.integers(8, 1000),
    "adapter_fallback": switches,
    "auth_all_routes": switches, "cors_allow_origin": st.lists(texts), "payload_limit": positive,
    "tokenizer_name": texts, "tokenizer_config_path": words.map(Path), "validation_workers": positive,
    "disable_grammar_support": switches, "allow_image_fetch": switches, "image_fetch_hosts": st.lists(words),
    "max_image_fetch_size": positive,
    "plain_text_decode_errors": switches, "usage_stats": st.sampled_from(["on", "off", "no-stack"]),
    "vertex": switches, "kserve": switches, "ngrok": st.just(False), "ngrok_authtoken": texts, "ngrok_edge": texts,
    "aip_http_port": st.integers(0, 65535), "aip_predict_route": st.just("/predict"),
    "aip_health_route": st.just("/alive"), "docker_label": texts, "compute_type": texts,
    "tuned_by": texts, "launch_settings": texts, "sharded": st.just(False),
    "num_shard": positive, "max_input_length": positive, "shard_uds_path": texts, "master_addr": texts,
    "master_port": st.integers(0, 65535), "num_nodes": st.just(1), "node_rank": st.just(0), "no_shards": st.just(False),
    "compute_threads": positive, "env": switches, "graceful_termination_timeout": positive,
}  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> ServerConfig:
    """Server configs with any few fields set."""
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=6, unique=True))
    chosen = {name: draw(VALUES[name]) for name in names}
    try:
        return ServerConfig.model_validate({"waiting_served_ratio": 0.3} | chosen)
    except ValueError:
        return ServerConfig()


def _read_back(config: ServerConfig) -> ServerConfig:
    return load(ServerConfig, config.to_argv(), config.to_environ()).config


def test_the_property_covers_every_field() -> None:
    assert set(VALUES) == set(ServerConfig.model_fields)


def check_field(name: str, max_examples: int) -> None:
    filled = load(ServerConfig, [], {}).config

    @settings(max_examples=max_examples, derandomize=True)
    @given(VALUES[name])
    def check(value: object) -> None:
        config = ServerConfig.model_validate(dict(filled) | {name: value})
        assert _read_back(config) == config

    check()


@pytest.mark.parametrize("name", sorted(VALUES))
def test_to_argv_is_the_inverse_of_parsing(name: str) -> None:
    check_field(name, 4)


@pytest.mark.slow
def test_to_argv_is_the_inverse_of_parsing_for_many_values_of_each_field() -> None:
    for name in VALUES:
        check_field(name, 40)


@settings(max_examples=40, derandomize=True)
@given(configs())
def test_to_argv_is_the_inverse_of_parsing_for_several_fields(config: ServerConfig) -> None:
    filled = load(ServerConfig, [], {}).config
    config = ServerConfig.model_validate(
        {name: value if value is not None else getattr(filled, name) for name, value in config}
    )

    assert _read_back(config) == config


def test_flags_beat_the_environment_and_that_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 1\nmax_best_of = 1\nmax_top_n_tokens = 1\ncors_allow_origin = ["a", "b"]\n')

    loaded = load(
        ServerConfig, ["--config-file", str(file), "--port", "3"], {"PORT": "2", "MAX_BEST_OF": "2", "QUANTIZE": ""}
    )

    assert (loaded.config.port, loaded.config.max_best_of, loaded.config.max_top_n_tokens) == (3, 2, 1)
    assert loaded.config.cors_allow_origin == ("a", "b")
    assert loaded.sources["port"] == "flag"
    assert loaded.sources["max_best_of"] == "environment"
    assert loaded.sources["max_top_n_tokens"] == "file"
    assert loaded.sources["hostname"] == loaded.sources["waiting_served_ratio"] == "default"


def test_the_file_may_be_named_by_the_environment_and_serve_several_commands(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('dtype = "float32"\nnum_shard = 2\nport = 1\n')

    assert load(RouterConfig, [], {"CONFIG_FILE": str(file)}).config.port == 1
    assert load(ShardConfig, ["m"], {"CONFIG_FILE": str(file)}).config.dtype == "float32"


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--max-best-off", "3"], {}, "'--max-best-off'; the nearest valid one is '--max-best-of'"),
        (["--max-best-off=3"], {}, "'--max-best-off'; the nearest valid one is '--max-best-of'"),
        (["stray"], {}, "unexpected argument 'stray'"),
        (["--port"], {}, "expected one argument"),
        (["--port", "99999"], {}, "'99999' for '--port'"),
        ([], {"PORT": "x"}, "'x' for the variable PORT"),
        ([], {"JSON_OUTPUT": "1"}, "'1' for the variable JSON_OUTPUT: one of true, false"),
        (["--dtype", "int8"], {}, "'int8' for '--dtype': Input should be 'float16', 'bfloat16' or 'float32'"),
        (["--config-file", "/nonexistent.toml"], {}, "No such file"),
    ],
)
def test_a_setting_that_cannot_be_read_is_a_usage_error(
    argv: list[str], environ: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(ServerConfig, argv, environ)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_key_of_the_file_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.toml"
    file.write_text("max_best_off = 1\n")

    with pytest.raises(SystemExit):
        load(ServerConfig, ["--config-file", str(file)], {})

    assert "unknown key 'max_best_off'; the nearest valid one is 'max_best_of'" in capsys.readouterr().err


def test_a_wrong_secret_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.toml"
    file.write_text("api_key = 12345\n")

    with pytest.raises(SystemExit):
        load(ServerConfig, ["--config-file", str(file)], {})

    assert "12345" not in capsys.readouterr().err


def test_settings_that_do_not_go_together_raise_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match=r"^`max_input_tokens` must be < `max_total_tokens`$"):
        load(ServerConfig, ["--max-input-tokens", "9", "--max-total-tokens", "9"], {})


def test_switches_and_booleans_with_a_value() -> None:
    config = load(
        ServerConfig, ["--json-output", "--sharded", "true", "--prefill-chunking", "false", "-e"],
        {"PREFIX_CACHING": "0", "TRUST_REMOTE_CODE": "true", "ENV": "prod"},
    ).config  # fmt: skip

    assert config.json_output
    assert config.sharded
    assert config.env
    assert config.trust_remote_code
    assert not config.prefill_chunking
    assert config.prefix_caching is False


def test_short_flags() -> None:
    config = load(ServerConfig, ["-p", "8080", "-g", "1"], {}).config

    assert (config.port, config.graceful_termination_timeout, config.prometheus_port) == (8080, 1, None)


def test_defaults_that_differ_by_command() -> None:
    launcher, router = load(ServerConfig, [], {}).config, load(RouterConfig, [], {}).config

    assert (launcher.waiting_served_ratio, router.waiting_served_ratio) == (0.3, 1.2)
    assert (launcher.max_batch_prefill_tokens, router.max_batch_prefill_tokens) == (None, 4096)
    assert (launcher.model_id, router.tokenizer_name) == ("bigscience/bloom-560m", "bigscience/bloom")
    assert load(ShardConfig, ["m"], {}).config.otlp_service_name == "text-generation-inference.server"


def test_the_v2_schema_has_fixed_default_lengths() -> None:
    config = load(RouterConfig, ["--grpc-schema", "v2", "--max-total-tokens", "4096"], {}).config

    assert (config.max_input_tokens, config.max_total_tokens) == (1024, 4096)


def test_the_model_server_takes_switches_with_no() -> None:
    assert load(ShardConfig, ["m", "--json-output", "--no-json-output"], {}).config.json_output is False
    config = load(DownloadConfig, ["m", "--no-auto-convert"], {}).config
    assert config.auto_convert is False
    assert load(DownloadConfig, config.to_argv(), {}).config == config


def test_the_first_token_variable_that_is_set_counts() -> None:
    config = load(ServerConfig, [], {"HF_TOKEN": "", "HF_API_TOKEN": "a", "HUGGING_FACE_HUB_TOKEN": "b"}).config

    assert config.hub_token is not None
    assert config.hub_token.get_secret_value() == "a"


def test_rank_variables() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}

    assert load_rank(environ).rank == 1
    with pytest.raises(ArgumentError, match="WORLD_SIZE"):
        load_rank({key: value for key, value in environ.items() if key != "WORLD_SIZE"})
    with pytest.raises(ArgumentError, match="RANK is 2"):
        load_rank(environ | {"RANK": "2"})


def test_visible_devices_come_from_the_first_variable() -> None:
    assert visible_devices({"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "0,1"}) == "0,1"
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == ""
    assert visible_devices({}) is None


def test_help_names_every_flag_its_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(ServerConfig, ["--help"], {})

    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for name, field in ServerConfig.model_fields.items():
        flags = list(flag_words(name, field, "x")) if source_of(field).flag else []
        assert all(word in text for word in flags if word.startswith("--"))
    assert "[default: 0.3] [env: WAITING_SERVED_RATIO]" in text
    assert "Number of shards: processes that divide one model, each on its own device." in text


def test_no_default_is_a_number_that_cannot_be_written() -> None:
    values = (value for _, value in load(ServerConfig, [], {}).config)

    assert not any(isinstance(value, float) and not math.isfinite(value) for value in values)


def test_hardening_R23_only_a_similar_flag_is_suggested(capsys):
    for flag in ("--nope", "--max-input-token"):
        with pytest.raises(SystemExit):
            load(ServerConfig, [flag, "1"], {})

    near, far = "the nearest valid one is", capsys.readouterr().err
    assert far.count(near) == 1
    assert "'--max-input-tokens'" in far
