"""A lock file of this user, with an OS lock that ends with its process. Links and files of other users are refused."""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from loadgen.config.parsing import environment
from tuner.errors import DeviceBusyError

FOLDER = "tgi-tune"
POLL_S = 0.2


def lock_folder() -> Path:
    """The user's folder of lock files: in XDG_RUNTIME_DIR, else in ~/.cache. Raises DeviceBusyError."""
    runtime = environment("XDG_RUNTIME_DIR").get("XDG_RUNTIME_DIR")
    parent = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path.home() / ".cache"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return owned_folder(parent / FOLDER)


def owned_folder(path: Path) -> Path:
    """Make a folder with mode 0700. Raises DeviceBusyError if it is a link, or if others own or can write to it."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise DeviceBusyError(f"the lock folder {path} is not a folder that only this user can write to: remove it")
    return path


class LockFile:
    """An exclusive lock on a file. `note`: text that the holder wrote."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises DeviceBusyError unless it is a plain file of this user, without links."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise DeviceBusyError(f"cannot open the lock file {path}: {error.strerror}") from None
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            os.close(self._file)
            raise DeviceBusyError(f"the lock file {path} is not a plain file of this user without links: remove it")

    def acquire(self, wait_s: float, now_s: Callable[[], float] = time.monotonic) -> bool:
        """Try to take the lock for `wait_s`; false if another process has it."""
        deadline_s = now_s() + wait_s
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if now_s() >= deadline_s:
                return False
            time.sleep(POLL_S)

    @property
    def note(self) -> str:
        return os.pread(self._file, 256, 0).decode(errors="replace").strip()

    def write_note(self, text: str) -> None:
        """Replace the note. The caller must have the lock."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._file)
