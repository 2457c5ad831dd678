from pathlib import Path
from typing import Any

import pytest

from reference_server.configuration.config import RouterConfig, ServerConfig, ShardConfig
from reference_server.configuration.config_fields import variables_of
from reference_server.configuration.settings import load
from reference_server.launcher.children import (
    SHARD_FLAGS,
    ChildCommand,
    Programs,
    download_adapter_command,
    download_command,
    hub_adapters,
    launch_settings,
    logger_level,
    needs_download,
    router_command,
    shard_command,
)
from reference_server.launcher.devices import Devices
from reference_server.launcher.plan import LaunchPlan

PROGRAMS = Programs(("server",), ("router",))
MACHINE = Devices(num_cores=4, available_memory_bytes=2**40)


def plan(**settings: Any) -> LaunchPlan:
    defaults = {"model_id": "preset:tiny-llama", "waiting_served_ratio": 0.3, "otlp_service_name": "service"}
    return LaunchPlan.resolve(ServerConfig.model_validate(defaults | settings), None, MACHINE)


def shard(rank: int = 0, environ: dict[str, str] | None = None, **settings: Any) -> ChildCommand:
    return shard_command(plan(**settings), PROGRAMS, environ or {}, rank, "/run/s", Path("/run/meet"))


def router(environ: dict[str, str] | None = None, **settings: Any) -> ChildCommand:
    return router_command(plan(**settings), PROGRAMS, environ or {}, "/run/s", {})


def value_of(command: ChildCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def test_a_plain_shard() -> None:
    command = shard(model_id="a/b")

    assert command.argv == (
        "server", "serve", "a/b", "--json-output", "--otlp-service-name", "service", "--uds-path", "/run/s",
        "--logger-level", "INFO",
    )  # fmt: skip
    assert command.environ == {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "SAFETENSORS_FAST_GPU": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "CUDA_MEMORY_FRACTION": "1.0", "PREFIX_CACHING": "true", "CPU_MEMORY_GIB": "4.0", "RUN_AHEAD": "true",
        "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1",
    }  # fmt: skip


def test_every_setting_of_a_shard_goes_by_flag_or_by_variable() -> None:
    by_variable = [name for name, field in ShardConfig.model_fields.items() if variables_of(name, field)]

    assert SHARD_FLAGS | set(by_variable) | {"listen", "log_level"} == set(ShardConfig.model_fields)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"dtype": "float32", "revision": "main", "trust_remote_code": True, "max_input_tokens": 8, "num_shard": 2},
        {"max_total_tokens": 9, "max_batch_size": 3, "watermark_gamma": 0.25, "watermark_delta": 1.5,
         "enable_prefill_logprobs": True, "disable_custom_kernels": True, "prefill_chunking": False,
         "compiled_walk": False, "prefix_caching": False, "attention": "torch", "cuda_graphs": "0",
         "cuda_memory_fraction": 0.5,
         "cpu_memory_gib": 1.5, "compute_threads": 2, "rope_factor": 2.5, "wiggle_room": 0.8,
         "huggingface_hub_cache": "/cache", "weights_cache_override": "/weights", "hub_token": "t"},
    ],
)  # fmt: skip
def test_a_shard_reads_the_planned_settings(settings: dict[str, Any]) -> None:
    command = shard(rank=0, environ={"MAX_BATCH_SIZE": "99", "SHARDED": "true"}, **settings)

    read = load(ShardConfig, command.argv[2:], command.environ).config

    planned = plan(**settings).config
    for name in set(ShardConfig.model_fields) & set(ServerConfig.model_fields) - {"json_output", "sharded"}:
        assert getattr(read, name) == getattr(planned, name), name
    assert read.sharded is (settings.get("num_shard", 1) > 1)


def test_launcher_L12_rope_scaling_reaches_the_shard() -> None:
    environ = shard(rope_factor=2.0).environ

    assert (environ["ROPE_SCALING"], environ["ROPE_FACTOR"]) == ("linear", "2")


def test_launcher_L13_the_graph_list_is_sent_only_if_given() -> None:
    assert "CUDA_GRAPHS" not in shard().environ
    assert shard(cuda_graphs="0").environ["CUDA_GRAPHS"] == "0"
    assert shard(cuda_graphs="1,2").environ["CUDA_GRAPHS"] == "1,2"


def test_launcher_L7_attention_is_exported_only_if_the_user_set_it() -> None:
    assert "ATTENTION" not in shard().environ
    environ = shard(attention="paged").environ
    assert (environ["ATTENTION"], environ["PREFIX_CACHING"]) == ("paged", "0")


def test_switches_have_the_words_the_model_server_knows() -> None:
    environ = shard(enable_prefill_logprobs=True, disable_custom_kernels=True).environ

    assert (environ["REQUEST_LOGPROBS"], environ["DISABLE_CUSTOM_KERNELS"]) == ("1", "True")


def test_a_group_meets_at_a_file_on_loopback() -> None:
    command = shard(rank=1, num_shard=2)

    assert "--sharded" in command.argv
    assert (command.environ["RANK"], command.environ["WORLD_SIZE"]) == ("1", "2")
    assert command.environ["RENDEZVOUS_FILE"] == "/run/meet"
    assert command.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_group_with_an_address_meets_there() -> None:
    environ = shard(num_shard=2, master_addr="10.0.0.1", master_port=5).environ

    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "5")
    assert "RENDEZVOUS_FILE" not in environ


def test_child_processes_do_not_repeat_the_warning_about_variables_without_effect() -> None:
    environ = {"FLASH_INFER": "1", "PATH": "/bin"}

    assert "FLASH_INFER" not in {**shard(environ=environ).environ, **router(environ=environ).environ}


def test_a_shard_inherits_variables_that_the_launcher_did_not_read() -> None:
    environ = shard(
        environ={"PATH": "/bin", "LOG_LEVEL": "debug", "API_KEY": "k", "HF_HUB_ENABLE_HF_TRANSFER": "1",
                 "OMP_WAIT_POLICY": "ACTIVE", "HF_API_TOKEN": "old", "QUANTIZE": "awq"},
        hub_token="token",
    ).environ  # fmt: skip

    assert environ["PATH"] == "/bin"
    assert environ["HF_TOKEN"] == "token"
    assert environ["HF_HUB_ENABLE_HF_TRANSFER"] == "1"
    assert environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert not {"LOG_LEVEL", "API_KEY", "HF_API_TOKEN", "QUANTIZE"} & set(environ)


def test_the_router_receives_its_required_flags() -> None:
    command = router()

    assert value_of(command, "--port") == "3000"
    assert value_of(command, "--max-batch-prefill-tokens") == "4096"
    assert value_of(command, "--waiting-served-ratio") == "0.3"
    assert value_of(command, "--master-shard-uds-path") == "/run/s-0"
    assert value_of(command, "--tokenizer-name") == "preset:tiny-llama"
    assert "--max-input-tokens" not in command.argv
    assert "--prometheus-port" not in command.argv


def test_the_router_receives_the_attention_that_fixes_the_page_of_schema_v2() -> None:
    command = router({"ATTENTION": "flashinfer"}, grpc_schema="v2", attention="flashdecoding")

    assert command.environ["ATTENTION"] == "flashdecoding"
    assert load(RouterConfig, command.argv[1:], command.environ).config.shard_attention == "flashdecoding"
    assert "ATTENTION" not in router().environ


def test_the_router_reads_the_planned_settings() -> None:
    settings = {
        "max_best_of": 2, "port": 0, "cors_allow_origin": ["a", "b"], "json_output": True, "max_input_tokens": 8,
        "prometheus_port": 9000, "api_key": "k", "hub_token": "t", "log_level": "debug", "step_timeout": 5.0,
        "auth_all_routes": True, "tuned_by": "s/1",
    }  # fmt: skip
    command = router({"MAX_BEST_OF": "7", "CONFIG_FILE": "/x", "MAX_BATCH_SIZE": "3"}, **settings)

    read = load(RouterConfig, command.argv[1:], command.environ).config

    planned = plan(**settings).config
    for name in set(RouterConfig.model_fields) & set(ServerConfig.model_fields) - {"launch_settings"}:
        assert getattr(read, name) == getattr(planned, name), name


def test_no_secret_is_in_any_command_line_or_repr() -> None:
    secrets = {"api_key": "hunter2", "hub_token": "hf_secret"}

    for command in (shard(**secrets), router(**secrets), download_command(plan(**secrets), PROGRAMS, {})):
        assert "hunter2" not in repr(command)
        assert "hf_secret" not in repr(command)
    assert router(**secrets).environ["API_KEY"] == "hunter2"
    assert "hunter2" not in router(**secrets).environ["LAUNCH_SETTINGS"]


def test_launch_settings_have_the_source_of_each_value() -> None:
    settings = launch_settings(plan(port=5, api_key="k"), {"port": "flag"})

    assert settings["port"] == {"value": 5, "source": "flag"}
    assert settings["api_key"]["value"] == "***"
    assert settings["compute_threads"] == {
        "value": 3, "source": "derived", "reason": "4 cores but one",
    }  # fmt: skip


def test_settings_of_a_file_that_names_its_study_are_tuned() -> None:
    settings = launch_settings(plan(tuned_by="s/1", max_best_of=1), {"max_best_of": "file", "tuned_by": "file"})

    assert settings["max_best_of"] == {"value": 1, "source": "tuned"}


def test_the_download_command() -> None:
    command = download_command(plan(model_id="a/b", revision="r"), PROGRAMS, {"PATH": "/bin"})

    assert command.argv == (
        "server", "download-weights", "a/b", "--extension", ".safetensors", "--logger-level", "INFO", "--json-output",
        "--merge-lora", "--revision", "r",
    )  # fmt: skip
    assert command.environ == {"PATH": "/bin", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def test_adapters_of_the_hub_are_downloaded_as_they_are(tmp_path: Path) -> None:
    adapters = f"a/b,clerk=c/d@v2,exclaim=preset:exclaim,local={tmp_path},lost=/no/such/directory"
    launch = plan(lora_adapters=adapters, weights_cache_override="/weights", hub_token="hf_secret")

    commands = [download_adapter_command(each, launch, PROGRAMS, {}) for each in hub_adapters(launch.config)]

    words = ("server", "download-weights")
    flags = ("--extension", ".safetensors", "--logger-level", "INFO", "--json-output")
    assert [command.argv for command in commands] == [
        (*words, "a/b", *flags),
        (*words, "c/d", *flags, "--revision", "v2"),
    ]
    assert commands[0].environ == {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_TOKEN": "hf_secret"}


def test_preset_dummy_and_complete_models_need_no_download(tmp_path: Path) -> None:
    assert needs_download(plan(model_id="a/b").config)
    assert not needs_download(plan(model_id="a/b", load_format="dummy").config)
    assert not needs_download(plan(model_id="preset:llama-125m").config)
    assert needs_download(plan(model_id=str(tmp_path)).config)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not needs_download(plan(model_id=str(tmp_path)).config)
    (tmp_path / "config.json").write_text('{"model_type": "mlp_speculator", "base_model_name_or_path": "a/b"}')
    assert needs_download(plan(model_id=str(tmp_path)).config), "its base model may be missing"


@pytest.mark.parametrize(
    "names",
    [
        ["pytorch_model.bin"],
        ["adapter_config.json", "adapter_model.safetensors"],
        ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "model-00001-of-00002.safetensors"],
    ],
    ids=["pickled", "adapter", "half-converted"],
)
def test_a_directory_with_files_to_convert_or_merge_needs_a_download(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()

    assert needs_download(plan(model_id=str(tmp_path)).config)


@pytest.mark.parametrize(
    ("log_level", "expected"),
    [("info", "INFO"), ("warn", "WARNING"), ("off", "CRITICAL"), ("debug", "DEBUG"), ("a=info,b=trace", "TRACE"),
     ("nonsense", "INFO")],
)  # fmt: skip
def test_the_level_a_shard_logs_at(log_level: str, expected: str) -> None:
    assert logger_level(log_level) == expected


def test_programs_are_modules_where_no_script_is_installed(tmp_path: Path) -> None:
    python = str(tmp_path / "python")
    assert Programs.beside(python).server == (python, "-m", "reference_server.model_server.cli")

    (tmp_path / "text-generation-router").write_text("")
    assert Programs.beside(python).router == (str(tmp_path / "text-generation-router"),)


TWO_NODES = {"num_nodes": 2, "num_shard": 1, "master_addr": "10.0.0.1", "shard_addr": "10.0.0.1:81,10.0.0.2:81"}


def test_a_shard_of_several_nodes_listens_at_its_address() -> None:
    command = shard(rank=1, node_rank=1, cpu_memory_gib=3.0, **TWO_NODES)

    assert value_of(command, "--listen") == "10.0.0.2:81"
    assert "--sharded" in command.argv
    group = {name: command.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SHARD_ADDR")}
    assert group == {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "SHARD_ADDR": "10.0.0.1:81,10.0.0.2:81",
    }  # fmt: skip
    assert "RENDEZVOUS_FILE" not in command.environ
    # Each node passes its own flag on; the shard divides by the ranks of both nodes.
    assert command.environ["CPU_MEMORY_GIB"] == "6.0"


def test_the_router_of_several_nodes_dials_every_shard() -> None:
    command = router(**TWO_NODES)

    assert "--master-shard-uds-path" not in command.argv
    assert (*command.argv, *command.environ.values()).count("10.0.0.1:81,10.0.0.2:81") == 1
