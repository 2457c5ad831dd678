"""Adapters that peft itself wrote: the logprobs and ids of its own forward, and of its merged model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from reference_server.adapter_source import AdapterSource
from reference_server.model_server.calls.local_shard import LocalShard
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import SavedModels, confirmed, random_prompt
from tests.support.models.tiny_shards import tiny_options, warm_up

PROMPTS = [random_prompt(length) for length in (9, 20)]
NEW_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """A family, and the settings of one adapter. targets: names, or the pattern of whole names."""

    family: str
    targets: list[str] | str
    settings: dict[str, Any]


LLAMA = "llama-tied-llama3-rope"
CASES = {
    "rank 1": Case(LLAMA, ["q_proj", "v_proj"], {"r": 1, "lora_alpha": 4}),
    "all linears": Case(LLAMA, "all-linear", {"r": 5, "lora_alpha": 3}),
    "rslora": Case(LLAMA, ["k_proj", "o_proj", "up_proj"], {"r": 16, "lora_alpha": 8, "use_rslora": True}),
    "a pattern of names": Case(LLAMA, r".*\.1\..*(gate|down)_proj", {"r": 3, "lora_alpha": 9}),
    "layers by number": Case(LLAMA, ["v_proj", "down_proj"], {"r": 4, "lora_alpha": 8, "layers_to_transform": [0]}),
    "packed projections": Case("phi3", ["qkv_proj", "gate_up_proj", "down_proj"], {"r": 4, "lora_alpha": 8}),
    "heads side by side": Case("gpt-neox", ["query_key_value", "dense_4h_to_h"], {"r": 4, "lora_alpha": 8}),
    "transposed weights": Case("gpt2", ["c_attn", "c_fc"], {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True}),
    "biases of the base": Case("opt", ["q_proj", "out_proj", "fc1"], {"r": 4, "lora_alpha": 8}),
    "parallel layers": Case("falcon", ["query_key_value", "dense"], {"r": 4, "lora_alpha": 8}),
    "scaled embeddings": Case("gemma2", "all-linear", {"r": 4, "lora_alpha": 8, "use_rslora": True}),
    "norms of heads": Case("qwen3", ["q_proj", "k_proj", "gate_proj"], {"r": 4, "lora_alpha": 8}),
}
# `test_adapters.py` has the other families, ranks and scales with adapters that the test writes.
SHORT = ("all linears", "a pattern of names", "layers by number")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in CASES]
)
async def test_logprobs_and_ids_are_those_of_pefts_forward(
    name: str, saved_models: SavedModels, tmp_path: Path
) -> None:
    # Imported here: it takes seconds.
    import peft

    case, saved = CASES[name], saved_models[CASES[name].family]
    config = peft.LoraConfig(target_modules=case.targets, task_type="CAUSAL_LM", **case.settings)
    base = AutoModelForCausalLM.from_pretrained(saved.directory, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.normal_(0.0, 0.3 if "lora_B" in parameter_name else 0.2, generator=generator)
    adapted.save_pretrained(tmp_path / "adapter")

    adapters = (AdapterSource("own", str(tmp_path / "adapter")),)
    shard = LocalShard.load(tiny_options(saved.directory, adapters=adapters))
    try:
        await warm_up(shard)
        driver = ShardDriver(shard, block_size=shard.engine.info.block_size)
        outcomes = await driver.run(
            *(
                driver.request(id_, prompt, NEW_TOKENS, adapter_id="own", prefill_logprobs=True)
                for id_, prompt in enumerate(PROMPTS)
            )
        )
    finally:
        shard.close()

    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        ids = [*prompt, *outcome.ids]
        expected, without = logprobs(adapted, ids), logprobs(saved.model, ids)
        assert outcome.prefill_tokens is not None
        found = torch.tensor([*outcome.prefill_tokens.logprobs[1:], *outcome.logprobs])
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert (found - without).abs().max() > 0.01, "the adapter changes nothing"
    merged = adapted.merge_and_unload()
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        assert outcome.ids == confirmed(merged, prompt, NEW_TOKENS, outcome.ids)


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Of each id after the first, in one forward of Transformers' or peft's own."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
