import json
import os

import pytest

from tuner.errors import DeviceBusyError
from tuner.trial.device_lock import device_lock


def test_a_locked_device_is_refused_with_the_pid_of_its_holder(tmp_path):
    messages = []

    with device_lock((0,), messages.append, folder=tmp_path), pytest.raises(DeviceBusyError, match=str(os.getpid())):  # noqa: SIM117
        with device_lock((0,), messages.append, wait_s=0.0, folder=tmp_path):
            pass
    with device_lock((0,), messages.append, wait_s=0.0, folder=tmp_path):
        assert json.loads((tmp_path / "gpu0.lock").read_text())["pid"] == os.getpid()
