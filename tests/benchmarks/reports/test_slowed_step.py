import statistics
from itertools import count

import pytest

from benchmarks.reports.slowed_step import main, slowed_calls, stretched
from reference_server.benchmark.steps import StepLoad, time_batch
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server import local_shard
from reference_server.model_server.local_shard import LocalShard
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


async def decode_step_s(rows: int) -> float:
    """The median time of a decode step of tiny-llama, over its shard's thread."""
    options = EngineOptions("preset:tiny-llama", dtype="float32", cpu_memory_gib=0.05, compute_threads=1)
    shard = LocalShard.load(options)
    warmup = Request(0, ("_test " * 64,), 64, ChooserParameters(), StoppingParameters(1))
    await shard.warmup(WarmupRequest(Batch(0, (warmup,)), 64, max_input_tokens=48, max_total_tokens=64))
    times = [await time_batch(shard, StepLoad("a b c d e f g h", 4, 24), rows) for _ in range(7)]
    shard.close()
    return statistics.median(each.decode_s / each.decode_steps for each in times)


@pytest.mark.parametrize("rows", [1, 4])
async def test_decode_steps_take_the_factor_at_any_concurrency(monkeypatch: pytest.MonkeyPatch, rows: int):
    plain = await decode_step_s(rows)
    monkeypatch.setattr(local_shard, "RankCalls", slowed_calls(4.0))

    slowed = await decode_step_s(rows)

    assert 2.5 < slowed / plain < 6.0
