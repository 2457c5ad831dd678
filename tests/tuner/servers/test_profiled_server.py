"""A server described by a profile: its space, its launch, its log, its exports; no flag of another server."""

import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from tuner.config import ServerSection, TuneConfig
from tuner.errors import SpaceError
from tuner.proposers.infeasible_by_dominance import dominance_of
from tuner.servers.find_profile import find_profile, shipped_profiles
from tuner.servers.select import server_of
from tuner.space.search_space import SearchSpace
from tuner.trial.outcome import TrialResult

SETTINGS = {"model_id": "m.gguf", "parallel": 16, "ubatch": 128, "cont_batching": False, "cache_type_k": "q8_0"}


@pytest.fixture
def llamacpp():
    return server_of(ServerSection(profile="llamacpp", model_id="m.gguf"))


@pytest.fixture
def vllm():
    return server_of(ServerSection(profile="vllm", model_id="m", gpus=(2,)))


def test_a_profile_sets_the_kind_of_its_server():
    config = TuneConfig.model_validate({"server": {"profile": "llamacpp"}})

    assert config.server.kind == "profile"
    assert not config.uses_simulator


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_server_of_a_shipped_profile_listens_on_loopback(name):
    words = server_of(ServerSection(profile=name, model_id="m")).launch({"model_id": "m"}, Path()).command

    assert words[words.index("--host") + 1] == "127.0.0.1"


def test_a_profile_that_is_nested_too_deeply_is_refused(tmp_path):
    profile = tmp_path / "deep.toml"
    profile.write_text("a = " + "[" * 100_000)

    with pytest.raises(SpaceError, match=r"deep.toml: "):
        find_profile(str(profile))


def test_settings_become_flags_of_the_server_and_unset_ones_none(llamacpp):
    launch = llamacpp.launch({**SETTINGS, "flash_attn": "auto"}, Path())

    assert launch.command[:7] == ("llama-server", "--host", "127.0.0.1", "--port", "{port}", "--model", "m.gguf")
    assert launch.command[9:] == (
        *("--parallel", "16", "--ubatch-size", "128", "--no-cont-batching", "--cache-type-k", "q8_0"),
    )


def test_settings_of_the_environment_become_variables(vllm):
    launch = vllm.launch({"model_id": "m", "cpu_kvcache_space": 2, "enforce_eager": True}, Path())

    assert launch.environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert launch.command[-1] == "--enforce-eager"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"ubatch": 4096}, "forbids `ubatch > batch`"),
        ({"parallel": 2.5}, "`parallel` is 2.5: must be an integer"),
        ({"flash_attn": "maybe"}, "must be one of auto, on, off"),
        ({"max_batch_prefill_tokens": 64}, "not a setting of profile llamacpp"),
        ({"cont_batching": 1}, "must be true or false"),
    ],
)
def test_settings_that_the_server_refuses_are_refused_by_name(llamacpp, settings, expected):
    with pytest.raises(SpaceError, match=expected):
        llamacpp.validate(settings)


def test_a_rule_applies_only_where_its_settings_are_known(vllm):
    vllm.validate({"max_num_seqs": 1024})
    with pytest.raises(SpaceError, match="max_num_seqs > max_num_batched_tokens"):
        vllm.validate({"max_num_seqs": 1024, "max_num_batched_tokens": 512})


def test_the_default_space_has_the_central_settings_that_are_not_fixed():
    server = server_of(ServerSection(profile="llamacpp", fixed={"batch": 512}))
    space = SearchSpace.of(server.params(), (), server.known)

    assert {each.name for each in space.parameters} == {"parallel", "ubatch", "flash_attn"}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("E llama_kv_cache: failed to allocate buffer for kv cache", "memory"),
        ("error: invalid argument: --parallell", "flag"),
        ("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 40960524288", "memory"),
        ("failed to initialize the context: failed to allocate buffer for kv cache", "memory"),
        ("failed to initialize the context: n_seq_max must be <= 256", "flag"),
        ("llama_init_from_model: quantized V cache requires flash_attn to be enabled", "flag"),
        ("segmentation fault", "crash"),
    ],
)
def test_the_cause_of_a_failed_start_is_read_from_the_log(llamacpp, text, cause):
    assert llamacpp.cause_of(text, exit_code=1) == cause


def test_facts_are_the_last_numbers_that_the_log_states(llamacpp, vllm):
    line = "srv load_model: initializing, n_slots = 32, n_ctx_slot = 512, kv_unified = 'false'"
    kv = "CPU KV cache size: 1,048,576 tokens, Maximum concurrency for 1,024 tokens per request: 1024.00x"

    assert llamacpp.facts_of(line) == {"slots": 32, "ctx_per_slot": 512}
    assert vllm.facts_of(f"{kv.replace('1,048', '9')}\n{kv}") == {"kv_tokens": 1048576, "max_concurrency": 1024}


def dead(parallel, ubatch):
    settings = {"model_id": "m.gguf", "parallel": parallel, "ubatch": ubatch}
    return TrialResult(3, settings, "infeasible", phase="launch", cause="memory")


@pytest.mark.parametrize(
    ("parallel", "ubatch", "is_ruled_out"), [(16, 512, True), (32, 1024, True), (8, 1024, False), (32, 256, False)]
)
def test_a_failure_rules_out_settings_that_need_no_less(llamacpp, parallel, ubatch, is_ruled_out):
    settings = {"model_id": "m.gguf", "parallel": parallel, "ubatch": ubatch}

    assert (dominance_of(settings, [dead(16, 512)], llamacpp) is not None) is is_ruled_out


def test_failures_of_one_cause_rule_out_only_settings_that_need_no_less_of_any():
    vllm = server_of(ServerSection(profile="vllm", model_id="m"))
    settings = {"model_id": "m", "gpu_memory_utilization": 0.9, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    failed = TrialResult(3, settings, "infeasible", phase="launch", cause="memory")

    assert dominance_of({**settings, "max_num_seqs": 128}, [failed], vllm) is not None
    assert dominance_of({**settings, "max_num_batched_tokens": 512}, [failed], vllm) is None


def test_a_failure_rules_out_no_configuration_with_a_smaller_context(llamacpp):
    failed = dead(16, 512)
    small = {**failed.settings, "ctx_size": 1024}
    large = TrialResult(3, {**failed.settings, "ctx_size": 1048576}, "infeasible", phase="launch", cause="memory")

    assert dominance_of(small, [large], llamacpp) is None


def test_the_toml_and_the_command_line_export_the_same_settings(llamacpp):
    assert tomllib.loads(llamacpp.export("toml", SETTINGS, ["why"])) == SETTINGS
    words = shlex.split(llamacpp.export("cli", SETTINGS, []))
    assert words[words.index("--parallel") + 1] == "16"
    assert words[words.index("--port") + 1] == "8080"


def test_the_script_starts_the_server_on_the_port_of_its_environment(llamacpp, tmp_path):
    server = tmp_path / "llama-server"
    server.write_text('#!/bin/sh\necho "$@"\n')
    server.chmod(0o755)
    script = tmp_path / "run.sh"
    script.write_text(llamacpp.export("script", {**SETTINGS, "model_id": "my model's.gguf"}, ["why"]))

    done = subprocess.run(
        ["sh", str(script), "--verbose"], env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PORT": "81"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert "--port 81 --model my model's.gguf" in done.stdout
    assert done.stdout.endswith("--verbose\n")


@pytest.mark.parametrize("profile", ["llamacpp", "sglang", "vllm"])
@pytest.mark.parametrize("form", ["cli", "compose", "docker", "env", "k8s", "script", "toml"])
def test_no_export_has_a_flag_of_another_server(profile, form):
    server = server_of(ServerSection(profile=profile, model_id="m"))
    text = server.export(form, {"model_id": "m"}, ["why"])

    assert "--model-id" not in text
    assert "text-generation" not in text


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("llamacpp", ["ghcr.io/ggml-org/llama.cpp:server", "--host", "0.0.0.0"]),
        ("vllm", ["vllm/vllm-openai:v0.32.0", "serve", "org/m"]),
        ("sglang", ["lmsysorg/sglang:latest", "-m", "sglang.launch_server"]),
    ],
)
def test_a_container_starts_the_program_of_the_profile(profile, expected):
    server = server_of(ServerSection(profile=profile, model_id="org/m", command="/opt/x/run -m y {model} {port}"))
    program = {"vllm": "vllm", "sglang": "python3"}.get(profile)

    text = server.export("docker", {"model_id": "org/m"}, [])
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    manifest = server.export("k8s", {"model_id": "org/m"}, [])

    assert words[words.index(expected[0]) :][:3] == expected
    assert (f"--entrypoint {program}" in " ".join(words)) is (program is not None)
    assert (f'command: ["{program}"]' in manifest) is (program is not None)
    compose = server.export("compose", {"model_id": "org/m"}, [])
    assert (f'entrypoint: ["{program}"]' in compose) is (program is not None)


def test_the_command_of_the_study_replaces_that_of_the_profile():
    section = ServerSection(profile="llamacpp", model_id="m", command="/opt/llama-server --model {model} --port {port}")

    assert server_of(section).launch({"model_id": "m"}, Path()).command[0] == "/opt/llama-server"
