import json
import os
import stat
import subprocess
import sys

import pytest

from tuner.errors import DeviceBusyError
from tuner.trial.device_lock import device_lock
from tuner.trial.lock_file import lock_folder

HOLD = """
import sys, time
from pathlib import Path
from tuner.trial.device_lock import device_lock
with device_lock((), print, folder=Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_locked_device_is_refused_with_the_pid_of_its_holder(tmp_path):
    messages = []

    with device_lock((0,), messages.append, folder=tmp_path), pytest.raises(DeviceBusyError, match=str(os.getpid())):  # noqa: SIM117
        with device_lock((0,), messages.append, wait_s=0.0, folder=tmp_path):
            pass
    with device_lock((0,), messages.append, wait_s=0.0, folder=tmp_path):
        assert json.loads((tmp_path / "gpu0.lock").read_text())["pid"] == os.getpid()


def test_hardening_S2_a_planted_link_is_neither_followed_nor_truncated(tmp_path):
    linked, shared, locks = tmp_path / "linked", tmp_path / "shared", tmp_path / "locks"
    for victim in (linked, shared):
        victim.write_text("precious")
    locks.mkdir(mode=0o700)
    (locks / "cpu.lock").symlink_to(linked)
    (locks / "gpu0.lock").hardlink_to(shared)

    for gpus in ((), (0,)):
        with pytest.raises(DeviceBusyError, match="the lock file"), device_lock(gpus, print, folder=locks):
            pass

    assert [victim.read_text() for victim in (linked, shared)] == ["precious"] * 2


@pytest.mark.parametrize("plant", ["link", "writable", "file"])
def test_hardening_S2_a_lock_folder_that_others_control_is_refused(tmp_path, plant):
    folder = tmp_path / "locks"
    match plant:
        case "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        case "writable":
            folder.mkdir()
            folder.chmod(0o777)
        case "file":
            folder.write_text("")

    with pytest.raises(DeviceBusyError, match="only this user can write"), device_lock((), print, folder=folder):
        pass


def test_hardening_S2_locks_are_in_a_folder_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert lock_folder() == tmp_path / "tgi-tune"

    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert lock_folder() == tmp_path / "home" / ".cache" / "tgi-tune"
    assert stat.S_IMODE(lock_folder().stat().st_mode) == 0o700


def test_a_lock_is_freed_with_its_holder_and_read_while_it_is_held(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert holder.stdout.readline() == "held\n"
    shown: list[str] = []
    with pytest.raises(DeviceBusyError, match=f"cpu is locked by process {holder.pid} for more"):  # noqa: SIM117
        with device_lock((), shown.append, wait_s=0.0, folder=tmp_path):
            pass
    assert shown == [f"waiting for process {holder.pid}, which measures on cpu: one measurement at a time"]

    holder.kill()
    holder.wait()
    holder.stdout.close()

    with device_lock((), print, wait_s=0.0, folder=tmp_path):
        pass
