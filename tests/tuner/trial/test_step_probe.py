"""The requests before the load of a trial."""

import json

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.progress import SilentProgress
from tuner.trial.request_bursts import DECODED
from tuner.trial.step_probe import BURST_TOKENS, REPEATS, probe_bursts, probe_steps


class Control:
    def __init__(self, bodies: list[dict], status: int) -> None:
        self._bodies, self._status = bodies, status

    def post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        self._bodies.append(json.loads(body))
        return self._status, b"{}"

    def close(self) -> None: ...


class FakeTarget:
    def __init__(self, status: int = 200) -> None:
        self.bodies: list[dict] = []
        self._status = status

    def info(self) -> dict[str, int]:
        return {"max_input_tokens": 512, "max_total_tokens": 1024, "max_concurrent_requests": 128}

    def control(self) -> Control:
        return Control(self.bodies, self._status)


def test_the_probe_has_few_and_many_rows_at_short_and_long_contexts_first():
    bursts = probe_bursts(16, 2000)

    assert {(each.count, each.input_tokens) for each in bursts[:4]} == {(1, 32), (1, 1024), (16, 32), (16, 256)}
    assert {each.count for each in bursts} == {1, 2, 4, 8, 16}
    assert all(each.count == 1 or each.count * each.input_tokens <= BURST_TOKENS for each in bursts)
    assert {*bursts[: len(bursts) // REPEATS]} == {*bursts}


@pytest.mark.parametrize("longest", [1, 40])
def test_the_probe_of_a_server_with_short_inputs_is_within_its_limit(longest: int):
    assert max(each.input_tokens for each in probe_bursts(4, longest)) == longest


def test_the_probe_has_up_to_twice_the_users_and_different_prompts():
    target = FakeTarget()

    probe_steps(target, BenchConfig(concurrency=2), {}, SilentProgress())  # type: ignore[arg-type]

    assert len({body["inputs"] for body in target.bodies}) == len(target.bodies)
    decoding = [body for body in target.bodies if body["parameters"]["max_new_tokens"] == DECODED]
    assert len(decoding) == REPEATS * (1 + 2 + 4) * 3


def test_a_server_with_drafts_is_not_probed_and_a_failed_probe_is_no_failed_trial():
    drafting, failing = FakeTarget(), FakeTarget(status=500)

    probe_steps(drafting, BenchConfig(), {"speculate": 3}, SilentProgress())  # type: ignore[arg-type]
    probe_steps(failing, BenchConfig(concurrency=1), {}, SilentProgress())  # type: ignore[arg-type]

    assert (drafting.bodies, len(failing.bodies)) == ([], 1)
