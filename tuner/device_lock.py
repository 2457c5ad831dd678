"""One measurement at a time on a device: a lock of the operating system, gone with its holder."""

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from loadgen.accelerator import open_accelerators
from tuner.errors import DeviceBusyError
from tuner.study import started_at

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
    """Hold the devices, the processor where there are none; waits for whoever has them.

    Raises DeviceBusyError naming the holder after `wait_s`.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"tgi-tune-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as held:
        for name in [f"gpu{index}" for index in sorted(gpus)] or ["cpu"]:
            _hold(held, folder / f"{name}.lock", name, say, wait_s)
        yield


def _hold(held: contextlib.ExitStack, path: Path, device: str, say: Callable[[str], None], wait_s: float) -> None:
    deadline_s, is_told = time.monotonic() + wait_s, False
    file = held.enter_context(path.open("a+"))
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            if time.monotonic() >= deadline_s:
                raise DeviceBusyError(f"{device} is held by {holder or 'another process'}") from None
            if not is_told:
                say(f"waiting for {device}, held by {holder or 'another process'}")
                is_told = True
            time.sleep(POLL_S)
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "started": started_at(os.getpid())}))
    file.flush()


class GpuMemory:
    """What the devices' memory held before a launch, and whether it is back after the stop."""

    def __init__(self, gpus: Sequence[int], now_s: Callable[[], float] = time.monotonic) -> None:
        self._gpus = tuple(gpus)
        self._now_s = now_s
        self._before = self._used()

    def wait_until_back(self) -> None:
        """Raises DeviceBusyError when it is not back within a minute: what follows would be measured beside it."""
        deadline_s = self._now_s() + MEMORY_WAIT_S
        while (more := self._more()) > MEMORY_SLACK_BYTES:
            if self._now_s() > deadline_s:
                raise DeviceBusyError(f"the GPU still holds {more / 2**20:,.0f} MiB more than before the launch")
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
