"""Processor times of a process, as the kernel reports them."""

import os
import sys

import pytest

from loadgen.target.launched.contention import ProcessorTimes
from loadgen.target.launched.process_memory import memory_of


def test_contention_is_the_time_ready_to_run_over_the_time_that_it_ran():
    before = ProcessorTimes(1_000, 500)

    assert ProcessorTimes(3_000, 1_500).contention_since(before) == pytest.approx(1.5)
    assert ProcessorTimes(3_000, 500).contention_since(before) == 1.0
    assert ProcessorTimes(1_000, 900).contention_since(before) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processor_times_and_memory_of_this_process_are_read():
    before = ProcessorTimes.of(os.getpid())
    sum(range(3_000_000))
    after = ProcessorTimes.of(os.getpid())

    assert before is not None
    assert after is not None
    assert after.ran_ns > before.ran_ns
    assert after.contention_since(before) >= 1.0
    resident, free = memory_of(os.getpid())
    assert resident > 2**20
    assert free > 2**20
    assert ProcessorTimes.of(2**22 + 1) is None
