"""Draft heads behind every packed family: they read what its output head reads, and change no token.

The heads are fitted to the outputs, so that a hidden state of another layer, row or step shows as a refused draft.
"""

from pathlib import Path

import pytest

from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from tests.families.test_families import CASES, CHUNK_BUDGET, UNFUSED
from tests.support.models.checkpoints.saved_heads import save_fitted_medusa, save_medusa, save_mlp_speculator
from tests.support.models.shard_driver import Outcome, ShardDriver
from tests.support.models.tiny_models import (
    VOCAB_SIZE,
    SavedModels,
    generate_alone,
    one_group_each,
    random_prompt,
    text_of,
)

PROMPTS = [random_prompt(length) for length in (4, 20, 2, 11)]
NEW_TOKENS = 10
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
# One of each: fused with windows, with ALiBi and as latent attention with experts; with modules of its own.
SHORT = ("llama-modules", "gemma2", "bloom", "deepseek-v3")


def load(directory: Path, **options: object) -> LocalShard:
    return LocalShard.load(
        EngineOptions(
            str(directory),
            dtype="float32",
            cpu_memory_gib=0.01,
            compute_threads=1,
            speculate_adaptive=False,
            **options,  # type: ignore[arg-type]
        )
    )


async def answers(shard: LocalShard) -> list[Outcome]:
    request = Request(0, (text_of([1] * 16),), 16, ChooserParameters(), StoppingParameters(1))
    await shard.warmup(WarmupRequest(Batch(0, (request,)), CHUNK_BUDGET))
    driver = ShardDriver(shard)
    return await driver.run(*(driver.request(id_, prompt) for id_, prompt in enumerate(PROMPTS)))


@pytest.mark.parametrize("name", one_group_each(CASES, slow=set(CASES) - set(SHORT)))
async def test_heads_of_every_family_are_accepted_and_change_no_token(
    name: str, saved_models: SavedModels, tmp_path: Path
) -> None:
    saved = saved_models[name.removesuffix(UNFUSED)]
    expected = [generate_alone(saved.model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    heads = save_fitted_medusa(tmp_path, saved.directory, saved.model, PROMPTS, expected)
    shard = load(heads, fuse=not name.endswith(UNFUSED))

    outcomes = await answers(shard)
    shard.close()

    assert [outcome.ids for outcome in outcomes] == expected
    # One token of the prompt's step, then at most four of each.
    assert sum(outcome.num_generations for outcome in outcomes) < 0.6 * NEW_TOKENS * len(PROMPTS)


@pytest.mark.parametrize("name", ["medusa-v1", "medusa-v2", "mlp-speculator", "mlp-speculator, tied"])
async def test_heads_of_every_kind_change_no_token(name: str, saved_models: SavedModels, tmp_path: Path) -> None:
    saved = saved_models["llama"]
    expected = [generate_alone(saved.model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": saved.model.config.hidden_size}
    if name.startswith("medusa"):
        save_medusa(tmp_path, saved.directory, **sizes, version=int(name[-1]))
    else:
        save_mlp_speculator(tmp_path, saved.directory, **sizes, tied=name.endswith("tied"))
    shard = load(tmp_path)

    outcomes = await answers(shard)
    shard.close()

    assert shard.engine.backends["drafts"] == name.removesuffix(", tied")
    assert [outcome.ids for outcome in outcomes] == expected
