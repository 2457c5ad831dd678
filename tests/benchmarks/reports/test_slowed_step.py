from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from benchmarks.reports import slowed_step
from benchmarks.reports.slowed_step import main, stretched
from reference_server.benchmark.steps import StepLoad, time_batch
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.calls import local_shard
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions


def test_a_block_takes_the_factor_of_its_time():
    clock = count(0.0, 1.0)

    with stretched(3.0, lambda: next(clock)):
        for _ in range(3):
            next(clock)

    # It started at 0 and its work ended at 4: it may end at 12.
    assert next(clock) == 13.0


def test_a_factor_of_one_adds_nothing():
    clock = count(0.0, 1.0)

    with stretched(1.0, lambda: next(clock)):
        pass

    assert next(clock) == 3.0


def test_a_factor_below_one_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--factor", "0.9"])

    assert "`--factor` must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 4])
async def test_each_decode_step_takes_the_factor_at_any_concurrency(monkeypatch: pytest.MonkeyPatch, rows: int):
    factors: list[float] = []

    @contextmanager
    def counted(factor: float) -> Iterator[None]:
        factors.append(factor)
        yield

    monkeypatch.setattr(slowed_step, "stretched", counted)
    monkeypatch.setattr(local_shard, "RankCalls", slowed_step.slowed_calls(4.0))
    options = EngineOptions("preset:tiny-llama", dtype="float32", cpu_memory_gib=0.05, compute_threads=1)
    shard = LocalShard.load(options)
    warmup = Request(0, ("_test " * 64,), 64, ChooserParameters(), StoppingParameters(1))
    await shard.warmup(WarmupRequest(Batch(0, (warmup,)), 64, max_input_tokens=48, max_total_tokens=64))

    timed = await time_batch(shard, StepLoad("a b c d e f g h", 4, 24), rows)
    shard.close()

    # The call and what the shard computes after its reply, for the prefill and for each step; after the warm-up's too.
    assert factors == [4.0] * (1 + 2 * (1 + timed.decode_steps))
