"""Refused requests in the log: the first of a kind, then one line with a count in ten seconds."""

import logging

import pytest

from reference_server.router.telemetry.refusal_log import RefusalLog


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_refusals_of_one_kind_are_counted_and_the_first_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    clock = Clock()
    log = RefusalLog(clock)

    for number in range(1_000):
        log.note("validation", 422, ValueError(f"request {number}"))
    log.note("overloaded", 429, ValueError("full"))
    clock.now_s = 112.0
    log.note("validation", 422, ValueError("later"))
    log.note("validation", 422, ValueError("last"))

    assert [record.getMessage() for record in caplog.records] == [
        "request 0",
        "full",
        "later (and 999 more of kind 'validation' in 12 s)",
    ]


def test_each_error_of_the_server_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    log = RefusalLog()

    for number in range(3):
        log.note("generation", 500, ValueError(f"step {number}"))

    assert [record.getMessage() for record in caplog.records] == ["step 0", "step 1", "step 2"]
