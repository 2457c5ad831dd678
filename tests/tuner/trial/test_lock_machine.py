"""Locks of devices under any order of workers (reliability I20): at most one holder, and free again when it ends."""

import re
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tuner.errors import DeviceBusyError
from tuner.trial.device_lock import device_lock

WORKERS, GPUS = range(3), range(3)


class LockMachine(RuleBasedStateMachine):
    """Workers that lock sets of GPUs; a set is locked whole or not at all."""

    @initialize()
    def start(self):
        self.folder = Path(tempfile.mkdtemp())
        self.held = {}

    def teardown(self):
        for lock, _ in self.held.values():
            lock.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    def locked(self):
        return {gpu for _, gpus in self.held.values() for gpu in gpus}

    @rule(worker=st.sampled_from(WORKERS), gpus=st.lists(st.sampled_from(GPUS), min_size=1, max_size=3, unique=True))
    def acquire(self, worker, gpus):
        if worker in self.held:
            return
        lines = []
        lock = device_lock(gpus, lines.append, wait_s=0.0, folder=self.folder)
        if self.locked().isdisjoint(gpus):
            lock.__enter__()
            self.held[worker] = lock, gpus
            assert lines == []
        else:
            with pytest.raises(DeviceBusyError):
                lock.__enter__()
            assert re.fullmatch(r"waiting for process \d+, which measures on gpu\d: .*", lines[-1])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_failed=st.booleans())
    def release(self, data, is_failed):
        worker = data.draw(st.sampled_from(sorted(self.held)))
        lock, _ = self.held.pop(worker)
        error = RuntimeError("the trial failed")
        if is_failed:
            assert not lock.__exit__(RuntimeError, error, None)
        else:
            lock.__exit__(None, None, None)

    @invariant()
    def exactly_the_held_devices_are_locked(self):
        for gpu in GPUS:
            probe = device_lock([gpu], lambda _: None, wait_s=0.0, folder=self.folder)
            if gpu in self.locked():
                with pytest.raises(DeviceBusyError):
                    probe.__enter__()
            else:
                with probe:
                    pass


class LongLockMachine(LockMachine):
    """The same, more often."""


LockMachine.TestCase.settings = settings(max_examples=6, stateful_step_count=30, deadline=None, derandomize=True)
LongLockMachine.TestCase.settings = settings(LockMachine.TestCase.settings, max_examples=200, stateful_step_count=50)
test_a_device_has_one_holder_at_most = LockMachine.TestCase
test_a_device_has_one_holder_at_most_at_length = pytest.mark.slow(LongLockMachine.TestCase)
