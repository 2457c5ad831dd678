import dataclasses
from typing import Any

import pytest

from reference_server.configuration.config import ServerConfig
from reference_server.errors import ArgumentError, UnsupportedError
from reference_server.launcher.devices import Devices, Gpu, probe_devices
from reference_server.launcher.model_facts import ModelFacts
from reference_server.launcher.plan import LaunchPlan, NotEnoughDevicesError

# The worked example of the memory rule: a Llama 3.1 8B.
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
FACTS = ModelFacts.parse(LLAMA_8B)
L4 = Gpu("NVIDIA L4", 23034, 8.9)
T4 = Gpu("Tesla T4", 15360, 7.5)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 81920, 8.0)
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559, 9.0)
CPU = Devices(num_cores=2, available_memory_bytes=20 * 2**30)


def plan(
    facts: ModelFacts | None = FACTS, devices: Devices = CPU, model_id: str = "local/model", **settings: Any
) -> LaunchPlan:
    config = ServerConfig.model_validate({"model_id": model_id, "waiting_served_ratio": 0.3} | settings)
    return LaunchPlan.resolve(config, facts, devices)


def reason(launch: LaunchPlan, field: str) -> str:
    return next(decision.reason for decision in launch.resolved if decision.field == field)


@pytest.mark.parametrize(
    ("sharded", "num_shard", "visible", "expected"),
    [
        (True, None, 3, 3), (True, 2, None, 2), (False, 2, 4, 2), (False, None, 4, 1), (None, None, 4, 4),
        (None, None, None, 1), (None, 3, 8, 3),
    ],
)  # fmt: skip
def test_number_of_shards(sharded: bool | None, num_shard: int | None, visible: int | None, expected: int) -> None:
    devices = dataclasses.replace(CPU, visible=visible)

    assert plan(sharded=sharded, num_shard=num_shard, devices=devices).num_shards == expected


def test_launcher_L3_sharding_over_one_device_is_refused() -> None:
    with pytest.raises(NotEnoughDevicesError, match="there is 1 device"):
        plan(sharded=True, devices=dataclasses.replace(CPU, visible=1))


def test_sharding_without_a_device_list_is_refused() -> None:
    with pytest.raises(NotEnoughDevicesError, match="no variable lists"):
        plan(sharded=True)


def test_no_visible_device_at_all_is_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match="`num_shard` is 0"):
        plan(devices=dataclasses.replace(CPU, visible=0))


@pytest.mark.parametrize(
    ("environ", "visible"),
    [
        ({}, None), ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3), ({"CUDA_VISIBLE_DEVICES": ""}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 1),
    ],
)  # fmt: skip
def test_visible_devices_are_the_items_of_the_first_variable(environ: dict[str, str], visible: int | None) -> None:
    assert probe_devices(environ).visible == visible


def test_launcher_L4_shards_are_as_many_as_visible_devices() -> None:
    devices = dataclasses.replace(CPU, visible=probe_devices({"CUDA_VISIBLE_DEVICES": "0,1,2"}).visible)

    assert plan(devices=devices).num_shards == 3


def test_launcher_L5_sharded_false_does_not_switch_num_shard_off() -> None:
    assert plan(sharded=False, num_shard=2).num_shards == 2


def test_an_accelerator_that_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="Intel XPU"):
        probe_devices({"ZE_AFFINITY_MASK": "0"})


def test_launcher_L7_paged_attention_turns_prefix_caching_off() -> None:
    launch = plan(attention="paged")

    assert launch.requested_attention == "paged"
    assert launch.config.prefix_caching is False


@pytest.mark.parametrize(("gpu", "attention"), [(T4, "paged"), (Gpu("NVIDIA A100", 40960, 8.0), "flashdecoding")])
def test_launcher_L8_an_unusual_head_size_falls_back(gpu: Gpu, attention: str) -> None:
    facts = dataclasses.replace(FACTS, head_dim=80)

    launch = plan(facts, Devices((gpu,)))

    assert (launch.requested_attention, launch.config.prefix_caching) == (attention, False)
    assert reason(launch, "prefix_caching") == "head size 80"


@pytest.mark.parametrize("head_dim", [32, 80, None])
def test_on_a_cpu_the_head_size_does_not_turn_prefix_caching_off(head_dim: int | None) -> None:
    launch = plan(dataclasses.replace(FACTS, head_dim=head_dim))

    assert (launch.requested_attention, launch.config.prefix_caching) == ("paged", True)
    assert "any head size" in reason(launch, "prefix_caching")
    assert plan(dataclasses.replace(FACTS, head_dim=head_dim), attention="paged").config.prefix_caching is False


def test_launcher_L9_a_text_model_asks_for_flashinfer_and_prefix_caching() -> None:
    launch = plan(devices=Devices((L4,)))

    assert (launch.requested_attention, launch.config.prefix_caching) == ("flashinfer", True)
    assert launch.config.attention == "auto"


def test_launcher_L10_adapters_leave_prefix_caching_on_as_each_has_prefixes_of_its_own() -> None:
    launch = plan(devices=Devices((L4,)), lora_adapters="a/b")

    assert (launch.requested_attention, launch.config.prefix_caching) == ("flashinfer", True)


def test_hardening_R14_dynamic_rope_turns_prefix_caching_off() -> None:
    scaled = ModelFacts.parse({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    newer = ModelFacts.parse({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    launches = [plan(scaled), plan(newer), plan(rope_scaling="dynamic"), plan(scaled, rope_scaling="linear")]

    assert [launch.config.prefix_caching for launch in launches] == [False, False, False, True]
    assert reason(launches[0], "prefix_caching") == "dynamic rope scaling"


def test_hardening_R15_long_rope_caches_prefixes_within_its_original_maximum() -> None:
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    facts = ModelFacts.parse({"model_type": "phi3", "rope_scaling": rope, "original_max_position_embeddings": 4096})
    launches = [plan(facts), plan(facts, max_total_tokens=4097), plan(facts, max_total_tokens=4096)]

    assert [launch.config.prefix_caching for launch in launches] == [False, False, True]


def test_launcher_L11_falcon_asks_for_flashdecoding() -> None:
    launch = plan(dataclasses.replace(FACTS, head_dim=64, model_type="falcon"), Devices((H100,)))

    assert (launch.requested_attention, launch.config.prefix_caching) == ("flashdecoding", True)


def test_falcon_without_a_gpu_asks_for_paged_without_prefix_caching() -> None:
    launch = plan(dataclasses.replace(FACTS, head_dim=64, model_type="falcon"))

    assert (launch.requested_attention, launch.config.prefix_caching) == ("paged", False)


@pytest.mark.parametrize(
    "facts",
    [
        {"has_vision": True},
        {"has_vision": True, "model_type": "paligemma"},
        {"is_encoder_decoder": True, "head_dim": 80},
    ],
)
def test_models_that_turn_prefix_caching_off(facts: dict[str, Any]) -> None:
    assert plan(dataclasses.replace(FACTS, **facts)).config.prefix_caching is False


def test_settings_of_the_user_win_over_those_of_the_model() -> None:
    launch = plan(dataclasses.replace(FACTS, head_dim=80), prefix_caching=True, attention="torch")

    assert launch.config.prefix_caching is True
    assert launch.requested_attention == "torch"


def test_an_unknown_model_asks_for_flashinfer_and_prefix_caching() -> None:
    launch = plan(None)

    assert (launch.requested_attention, launch.config.prefix_caching) == ("flashinfer", True)


def test_launcher_L12_a_rope_factor_alone_is_linear() -> None:
    launch = plan(rope_factor=2.0)

    assert (launch.config.rope_scaling, launch.config.rope_factor) == ("linear", 2.0)


def test_a_rope_kind_alone_has_factor_one() -> None:
    assert plan(rope_scaling="dynamic").config.rope_factor == 1.0


def test_launcher_L14_bitsandbytes_captures_no_graphs_and_warns() -> None:
    launch = plan(quantize="bitsandbytes", devices=Devices((L4,)))

    assert "bitsandbytes is deprecated, use eetq" in launch.warnings
    assert "CUDA graphs are not captured with bitsandbytes" in launch.warnings


def test_launcher_L15_the_prefill_budget_takes_the_gpu_one_second() -> None:
    launch = plan(devices=Devices((L4,)))

    assert launch.config.max_batch_prefill_tokens == 8049
    assert launch.compute_type == "1-nvidia-l4"


def test_launcher_L16_an_unknown_gpu_takes_the_default_of_the_model_type() -> None:
    facts = dataclasses.replace(FACTS, model_type="gemma3", max_position_embeddings=4096)

    launch = plan(facts, Devices((Gpu("NVIDIA RTX 6000 Ada", 49140, 8.9),)))

    assert launch.config.max_batch_prefill_tokens == 4096
    assert any("Unknown compute" in warning for warning in launch.warnings)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("NVIDIA L4", 8049), ("NVIDIA A10G", 8315), ("NVIDIA A100-SXM4-80GB", 20_755),
        ("NVIDIA H100 80GB HBM3", 59_870), ("NVIDIA H200", 65_791),
    ],
)  # fmt: skip
def test_the_worked_example_of_optimal_tokens(name: str, tokens: int) -> None:
    launch = plan(devices=Devices((Gpu(name, 200_000, 9.0),)))

    assert launch.config.max_batch_prefill_tokens == tokens


def test_the_worked_example_of_memory() -> None:
    assert FACTS.flop_per_token == 15_032_385_536
    assert FACTS.weight_bytes == 14_449_770_496
    assert FACTS.bytes_per_token == 260_096
    assert FACTS.tokens_that_fit(23034 * 2**20 * 0.95) == 32_662
    assert FACTS.tokens_that_fit(81559 * 2**20 * 0.95) == 256_809


def test_memory_that_is_short_caps_the_budget_with_a_warning() -> None:
    launch = plan(devices=Devices((Gpu("NVIDIA L4", 16000, 8.9),)))

    budget = launch.config.max_batch_prefill_tokens
    assert budget is not None
    assert 0 < budget < 8049
    assert any("Device memory limits" in warning for warning in launch.warnings)


@pytest.mark.parametrize(
    ("facts", "settings", "tokens"),
    [
        (None, {}, 4096),
        ({"model_type": "qwen2_vl", "has_vision": True}, {}, 10_000),
        ({"model_type": "gemma3", "has_vision": True}, {}, 8_000),
        ({"max_position_embeddings": 2048}, {}, 2048),
        ({}, {"max_batch_total_tokens": 1024}, 1024),
        ({}, {"max_input_tokens": 5000}, 4096),
        ({}, {"max_input_tokens": 5000, "prefill_chunking": False}, 5000),
        ({}, {"max_batch_prefill_tokens": 77}, 77),
    ],
)
def test_the_prefill_budget_on_a_cpu(facts: dict[str, Any] | None, settings: dict[str, Any], tokens: int) -> None:
    launch = plan(dataclasses.replace(FACTS, **facts) if facts is not None else None, **settings)

    assert launch.config.max_batch_prefill_tokens == tokens


def test_an_explicit_budget_is_no_decision() -> None:
    assert "max_batch_prefill_tokens" not in {item.field for item in plan(max_batch_prefill_tokens=77).resolved}


def test_a_prepared_checkpoint_names_its_quantization() -> None:
    facts = ModelFacts.parse(LLAMA_8B | {"quantization_config": {"quant_method": "gptq"}})

    assert plan(facts).config.quantize == "gptq"


def test_a_quantization_no_flag_names_makes_only_that_field_unknown() -> None:
    facts = ModelFacts.parse(LLAMA_8B | {"quantization_config": {"quant_method": "hqq"}})

    assert facts.quantize is None
    assert facts.hidden_size == 4096


def test_a_sharded_checkpoint_in_exl2_is_refused() -> None:
    facts = ModelFacts.parse(LLAMA_8B | {"quantization_config": {"quant_method": "exl2"}})

    with pytest.raises(ArgumentError, match="exl2 cannot be sharded"):
        plan(facts, num_shard=2)


def test_on_a_cpu_memory_threads_and_step_timeout_are_resolved() -> None:
    config = plan(num_shard=2, devices=dataclasses.replace(CPU, num_cores=9)).config

    assert (config.cpu_memory_gib, config.compute_threads, config.step_timeout) == (4.0, 4, 600.0)
    assert plan(devices=dataclasses.replace(CPU, available_memory_bytes=6 * 2**30)).config.cpu_memory_gib == 3.0
    assert plan(compute_threads=2).config.compute_threads == 2


def test_on_a_gpu_they_are_left_to_the_shard() -> None:
    config = plan(devices=Devices((L4,))).config

    assert (config.cpu_memory_gib, config.compute_threads, config.step_timeout) == (None, None, 120.0)


def test_the_old_name_of_the_input_length() -> None:
    config = plan(max_input_length=100).config

    assert (config.max_input_tokens, config.max_input_length) == (100, None)


def test_a_preset_without_weights_gets_random_ones() -> None:
    assert plan(model_id="preset:llama-3.1-8b").config.load_format == "dummy"


def test_running_ahead_is_on_unless_it_is_turned_off() -> None:
    launch = plan()

    assert launch.config.run_ahead is True
    assert "does not change outputs" in reason(launch, "run_ahead")
    assert plan(run_ahead=False).config.run_ahead is False


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        ({"head_dim": 96}, 96),
        ({"hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"n_embd": 64, "num_attention_heads": 4}, 16),
        ({"text_config": {"head_dim": 8}}, 8),
        ({"model_type": "gemma3"}, 256),
        ({"hidden_size": 65, "num_attention_heads": 4}, None),
    ],
)
def test_head_size_of_a_config(config: dict[str, Any], head_dim: int | None) -> None:
    assert ModelFacts.parse(config).head_dim == head_dim


def test_each_node_starts_its_own_ranks_and_the_first_the_router() -> None:
    nodes = {"num_nodes": 2, "num_shard": 2, "master_addr": "a", "shard_addr": "a:1,a:2,b:1,b:2"}
    first, second = (plan(node_rank=node_rank, **nodes) for node_rank in (0, 1))

    assert (list(first.ranks), first.has_router, first.world_size) == ([0, 1], True, 4)
    assert (list(second.ranks), second.has_router, second.world_size) == ([2, 3], False, 4)


def test_several_nodes_need_the_address_of_every_shard() -> None:
    with pytest.raises(ArgumentError, match="names 1 shards but 2 nodes of 2 have 4"):
        plan(num_nodes=2, num_shard=2, master_addr="a", shard_addr="a:1")
