"""The cost of drafts, measured in the warm-up."""

import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest

from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.draft_cost import CALL_NS, DraftCost
from reference_server.model_server.drafting import Drafter
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.speculation.proposed_draft import NO_PROPOSAL, ProposedDraft
from reference_server.model_server.speculation.step_cost import StepCost
from reference_server.model_server.stepper import RunAhead
from reference_server.presets.catalog import find
from reference_server.tokenizer import load_tokenizer
from tests.support.models.tiny_models import save_tiny_model
from tests.support.models.tiny_shards import tiny_options, warm_up

LOOK_S = 0.003


class SlowSource:
    """Finds nothing, slowly."""

    priors = (0.5,)

    def propose(self, sequences: SequenceOf[Sequence], _counts: SequenceOf[int], /) -> list[ProposedDraft]:
        time.sleep(LOOK_S)
        return [NO_PROPOSAL] * len(sequences)


async def measured(directory: Path, run_ahead: RunAhead) -> StepCost:
    shard = LocalShard.load(tiny_options(directory, cpu_memory_gib=0.05))
    await warm_up(shard)
    stepper = shard.engine.stepper
    stepper.drafter, stepper.run_ahead = Drafter(SlowSource(), 4), run_ahead
    preset = find("preset:tiny-llama")
    assert preset is not None
    tokenizer = load_tokenizer(preset.tokenizer_directory, 4096)
    try:
        return DraftCost(stepper, tokenizer, RankGroup(0, 1), 100, 16, 256).measure()
    finally:
        shard.close()


@pytest.mark.parametrize(
    "run_ahead", [RunAhead.AFTER_REPLY, pytest.param(RunAhead.BEFORE_READ, marks=pytest.mark.slow)]
)
async def test_the_measured_cost_of_a_look_and_of_a_step_is_the_time_in_a_server(
    tmp_path: Path, run_ahead: RunAhead
) -> None:
    cost = await measured(save_tiny_model(tmp_path, "llama"), run_ahead)

    assert cost.proposing_ns(1) > LOOK_S * 1e9
    # A device computes while the host serves.
    served_ns = 0 if run_ahead is RunAhead.BEFORE_READ else CALL_NS
    assert served_ns < cost.plain_ns(1)
