"""One `tgi-tune run` at a time on a study; others join it as workers. The lock is gone with its holder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tuner.errors import StudyError

LOCK_FILE = "run.lock"


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a study. Raises StudyError naming who does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise StudyError(
                f"process {file.read().strip() or '?'} works on {folder}; `tgi-tune worker` joins it"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
