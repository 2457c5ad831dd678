"""The directory of a run: its name, and its creation."""

import datetime
import secrets
import shutil
from pathlib import Path

from loadgen.errors import MeasurementError, UsageError
from reports.run_store import MANIFEST_FILE, links_in

MIN_FREE_BYTES = 64 * 2**20


def new_run_id(now: datetime.datetime | None = None) -> str:
    """A unique name that sorts by time."""
    now = now or datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def make_run_directory(out: Path) -> None:
    """Create a directory. Raises UsageError if it holds a run or links, or if that fails; MeasurementError if full."""
    if (out / MANIFEST_FILE).exists():
        raise UsageError(f"{out} already holds a run; choose another --out or remove it")
    try:
        # Prompts and answers are for this user alone.
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        links = links_in(out)
        free_bytes = shutil.disk_usage(out).free
    except OSError as error:
        raise UsageError(f"`out` is {str(out)!r}: {error.strerror}") from error
    if links:
        raise UsageError(f"{out} contains links ({', '.join(links)}): a run does not write through them; remove them")
    if free_bytes < MIN_FREE_BYTES:
        raise MeasurementError(
            f"{out} has {free_bytes / 2**20:.0f} MiB free, but a run needs {MIN_FREE_BYTES // 2**20} MiB"
        )
