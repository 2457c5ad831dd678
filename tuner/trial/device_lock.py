"""One measurement at a time on a device: a file lock for each GPU or the CPU, and the wait for freed GPU memory."""

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
    say: Callable[[str], None],
    *,
    wait_s: float = WAIT_S,
    folder: Path | None = None,
) -> Iterator[None]:
    """Hold the GPUs, or the CPU if there are none; waits while another process holds them.

    Raises DeviceBusyError naming the holder after `wait_s`.
    """
    folder = lock_folder() if folder is None else owned_folder(folder)
    with contextlib.ExitStack() as held:
        for name in [f"gpu{index}" for index in sorted(gpus)] or ["cpu"]:
            held.callback(_acquire(folder / f"{name}.lock", name, say, wait_s).close)
        yield


def _acquire(path: Path, device: str, say: Callable[[str], None], wait_s: float) -> LockFile:
    lock = LockFile(path)
    if not lock.acquire(0.0):
        holder = lock.note or "another process"
        say(f"waiting for {device}, held by {holder}")
        if not lock.acquire(wait_s):
            lock.close()
            raise DeviceBusyError(f"{device} is held by {holder}")
    lock.write_note(json.dumps({"pid": os.getpid()}))
    return lock


class GpuMemory:
    """Memory use of the GPUs before a launch, to compare with after the stop."""

    def __init__(self, gpus: Sequence[int], now_s: Callable[[], float] = time.monotonic) -> None:
        self._gpus = tuple(gpus)
        self._now_s = now_s
        self._before = self._used()

    def wait_until_freed(self) -> None:
        """Wait until the memory is freed. Raises DeviceBusyError after a minute."""
        deadline_s = self._now_s() + MEMORY_WAIT_S
        while (more := self._more()) > MEMORY_SLACK_BYTES:
            if self._now_s() > deadline_s:
                raise DeviceBusyError(
                    f"{more / 2**20:,.0f} MiB of GPU memory are not freed {MEMORY_WAIT_S:.0f} s after the stop"
                )
            time.sleep(POLL_S)

    def _more(self) -> float:
        return max((now - before for now, before in zip(self._used(), self._before, strict=False)), default=0.0)

    def _used(self) -> list[float]:
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
