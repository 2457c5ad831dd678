"""Allows one measurement at a time on a device: a file lock for each GPU or the CPU, and a wait for freed memory."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from loadgen.target.accelerator import open_accelerators
from tuner.errors import DeviceBusyError
from tuner.trial.lock_file import LockFile, lock_folder, owned_folder

WAIT_S = 3600.0
POLL_S = 0.2
MEMORY_SLACK_BYTES = 512 * 2**20
MEMORY_WAIT_S = 60.0


@contextlib.contextmanager
def device_lock(
    gpus: Sequence[int],
    show: Callable[[str], None],
    *,
    wait_s: float = WAIT_S,
    folder: Path | None = None,
) -> Iterator[None]:
    """Lock the GPUs, or the CPU if `gpus` is empty. Waits while another process has the lock.

    show: called with a line before a wait. folder: the folder of the lock files; None for the user's lock folder.
    Raises DeviceBusyError with the holder after `wait_s`.
    """
    folder = lock_folder() if folder is None else owned_folder(folder)
    with contextlib.ExitStack() as held:
        for name in [f"gpu{index}" for index in sorted(gpus)] or ["cpu"]:
            held.callback(_acquire(folder / f"{name}.lock", name, show, wait_s).close)
        yield


def _acquire(path: Path, device: str, show: Callable[[str], None], wait_s: float) -> LockFile:
    lock = LockFile(path)
    if not lock.acquire(0.0):
        holder = _holder(lock.note)
        show(f"waiting for {holder}, which measures on {device}: one measurement at a time")
        if not lock.acquire(wait_s):
            lock.close()
            raise DeviceBusyError(f"{device} is locked by {holder} for more than {wait_s:.0f} s")
    lock.write_note(json.dumps({"pid": os.getpid()}))
    return lock


def _holder(note: str) -> str:
    """The process that wrote the note of a lock."""
    try:
        return f"process {json.loads(note)['pid']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


class GpuMemory:
    """The memory use of GPUs before a launch, compared with the use after the stop."""

    def __init__(self, gpus: Sequence[int], now_s: Callable[[], float] = time.monotonic) -> None:
        self._gpus = tuple(gpus)
        self._now_s = now_s
        self._before = self._used()

    def wait_until_freed(self) -> None:
        """Wait until the launch's memory is freed. Raises DeviceBusyError after a minute."""
        deadline_s = self._now_s() + MEMORY_WAIT_S
        while (more := self._more()) > MEMORY_SLACK_BYTES:
            if self._now_s() > deadline_s:
                raise DeviceBusyError(
                    f"{more / 2**20:,.0f} MiB of GPU memory are not freed {MEMORY_WAIT_S:.0f} s after the stop"
                )
            time.sleep(POLL_S)

    def _more(self) -> float:
        """The largest increase of a GPU since the start, in bytes."""
        return max((now - before for now, before in zip(self._used(), self._before, strict=False)), default=0.0)

    def _used(self) -> list[float]:
        """The used bytes of each GPU; empty without GPUs or without their counters."""
        if not self._gpus:
            return []
        accelerators = open_accelerators("http://127.0.0.1")
        if accelerators is None:
            return []
        try:
            wanted = {f'gpu="{index}"' for index in self._gpus}
            return [
                value
                for name, labels, value in accelerators.sample()
                if name == "accelerator_memory_used_bytes" and labels in wanted
            ]
        finally:
            accelerators.close()
