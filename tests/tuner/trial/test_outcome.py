import pytest

from tuner.config import ServerSection
from tuner.servers.select import server_of
from tuner.trial.outcome import TrialResult, read_result


def test_a_result_reads_back_as_it_was_written(tmp_path):
    result = TrialResult(3, {"max_waiting_tokens": 7}, "measured", value=12.5, violations={"a <= 1": -0.5}, run="run")

    result.write(tmp_path)

    assert read_result(tmp_path) == result


def test_a_trial_without_a_result_has_none(tmp_path):
    assert read_result(tmp_path) is None


@pytest.mark.parametrize(
    ("log", "exit_code", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory", 1, "memory"),
        ("error: argument --x", 2, "flag"),
        ("`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: 4096 and 3296", 1, "no_cache"),
        ("Traceback: KeyError", 1, "crash"),
        ("", -9, "crash"),
    ],
)
def test_the_cause_of_a_failure_is_read_from_its_log(log, exit_code, cause):
    assert server_of(ServerSection()).cause_of(log, exit_code=exit_code) == cause
