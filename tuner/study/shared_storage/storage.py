"""Opens Optuna storages: a journal file by default, a database, or a gRPC proxy of a database."""

import contextlib
import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from loadgen.redaction import redacted_text
from tuner.errors import StorageLostError, StudyError

JOURNAL_FILE = "journal.log"
# Drivers of the databases, in order of preference.
DRIVERS = {
    "postgresql": ("psycopg", "psycopg2", "pg8000"),
    "mysql": ("pymysql", "MySQLdb"),
}
TAIL_BYTES = 65_536
RETRY_S = 60.0
LONGEST_PAUSE_S = 8.0
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


def open_storage(text: str, folder: Path) -> BaseStorage:
    """The storage at an address. Raises StudyError for a wrong address or a missing package, else StorageLostError."""
    kind, _, rest = text.partition(":")
    match kind:
        case "journal":
            return _journal(Path(rest) if rest else folder / JOURNAL_FILE)
        case "sqlite":
            path = Path(rest.removeprefix("///")).resolve()
            path.parent.mkdir(parents=True, exist_ok=True)
            return _database(f"sqlite:///{path}")
        case "postgresql" | "mysql":
            return _database(_with_driver(kind, rest))
        case "grpc":
            host, _, port = rest.removeprefix("//").rpartition(":")
            if not host or not port.isdigit():
                raise StudyError(
                    f"`storage` is {redacted_text(text)!r}, but the address of a proxy is grpc://HOST:PORT"
                )
            from tuner.study.shared_storage.storage_proxy import open_proxy

            return open_proxy(host, int(port))
    raise StudyError(
        f"`storage` is {redacted_text(text)!r}, but must be journal, journal:PATH, sqlite:PATH, postgresql://..., "
        "mysql://... or grpc://HOST:PORT"
    )


def _journal(path: Path) -> BaseStorage:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = JournalFileOpenLock(str(path))
    _cut_torn_line(path, lock)
    try:
        return JournalStorage(CheckedJournalFile(str(path), lock_obj=lock))
    except StudyError:
        raise
    except Exception as error:  # Optuna looks up keys and asserts types in what it reads
        raise _foreign(path, error) from error


class CheckedJournalFile(JournalFileBackend):  # type: ignore[misc]  # Optuna has no types here
    """A journal file that may get foreign lines while a study runs, for example from another program's output."""

    def __init__(self, path: str, lock_obj: JournalFileOpenLock) -> None:
        super().__init__(path, lock_obj=lock_obj)
        self._place = Path(path)

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """As in Optuna. Raises StudyError for a line without an operation."""
        try:
            for log in super().read_logs(log_number_from):
                if not _has_operation(log):
                    raise _foreign(self._place, ValueError("a line without an operation"))
                yield log
        except (ValueError, RecursionError) as error:
            raise _foreign(self._place, error) from error


def _foreign(path: Path, error: Exception) -> StudyError:
    wrong = _wrong_line(path)
    place = path if wrong is None else f"{path}, line {wrong}"
    return StudyError(f"{place}: not a journal of Optuna ({error!r}); restore the file, or use another study")


def _wrong_line(path: Path) -> int | None:
    """The first line that has no operation; None if each line has one."""
    with path.open("rb") as journal:
        for number, line in enumerate(journal, start=1):
            try:
                log = json.loads(line)
            except (ValueError, RecursionError):
                return number
            if not _has_operation(log):
                return number
    return None


def _has_operation(log: object) -> bool:
    return isinstance(log, dict) and isinstance(log.get("op_code"), int)


def _cut_torn_line(path: Path, lock: JournalFileOpenLock) -> None:
    """Move a half-written last line to `.torn`: otherwise the next line is appended to it, and the journal is
    unreadable.

    The lock excludes a process that is writing a line.
    """
    if _torn_line(path):
        lock.acquire()
        try:
            torn = _torn_line(path)
            if torn:
                with path.with_name(f"{path.name}.torn").open("ab") as kept:
                    kept.write(torn + b"\n")
                os.truncate(path, path.stat().st_size - len(torn))
                logger.warning("%s: its last line was half written, and is kept in %s.torn", path, path.name)
        finally:
            lock.release()


def _torn_line(path: Path) -> bytes:
    """The text after the last end of a line."""
    if not path.exists():
        return b""
    with path.open("rb") as journal:
        size = journal.seek(0, os.SEEK_END)
        tail = b""
        while size and b"\n" not in tail:
            start = max(0, size - TAIL_BYTES)
            journal.seek(start)
            tail = journal.read(size - start) + tail
            size = start
    return tail.rpartition(b"\n")[2]


def _database(url: str) -> BaseStorage:
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return RDBStorage(url)
    except (SQLAlchemyError, OSError) as error:
        raise StorageLostError(
            f"cannot open the storage {redacted_text(url)}: {redacted_text(_first_line(error))}"
        ) from error


def _with_driver(kind: str, rest: str) -> str:
    """The URL with an installed driver. Raises StudyError with the possible drivers if there is none."""
    driver = next((name for name in DRIVERS[kind] if importlib.util.find_spec(name)), None)
    if driver is None:
        raise StudyError(f"a {kind} storage needs one of {', '.join(DRIVERS[kind])}: pip install {DRIVERS[kind][0]}")
    return f"{kind}+{driver.lower()}:{rest}"


def with_retries(
    call: Callable[[], Result],
    *,
    sleep: Callable[[float], None] = time.sleep,
    now_s: Callable[[], float] = time.monotonic,
) -> Result:
    """Call the storage. While it is unreachable, retry for a minute with growing pauses.

    Raises StorageLostError after that, and StudyError if the storage refuses this process.
    """
    deadline_s, pause_s = now_s() + RETRY_S, 0.5
    while True:
        try:
            return call()
        except Exception as error:
            if (reason := _refusal_of(error)) is not None:
                raise StudyError(f"the study's storage refused this process: {reason}") from None
            if not _is_lost(error):
                raise
            if now_s() + pause_s > deadline_s:
                raise StorageLostError(
                    f"the study's storage is unreachable for {RETRY_S:.0f} s: {redacted_text(_first_line(error))}"
                ) from error
            logger.warning("the study's storage is unreachable, retrying: %s", _first_line(error))
        sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _refusal_of(error: Exception) -> str | None:
    """The reason if a proxy refused the token; None for another error."""
    with contextlib.suppress(ImportError):
        import grpc

        if isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return str(error.details())
    return None


def _is_lost(error: Exception) -> bool:
    """Whether an exception means that the storage is unreachable."""
    kinds: list[Any] = [ConnectionError, TimeoutError]
    with contextlib.suppress(ImportError):
        from sqlalchemy.exc import InterfaceError, OperationalError

        kinds += [InterfaceError, OperationalError]
    with contextlib.suppress(ImportError):
        from grpc import RpcError

        kinds.append(RpcError)
    with contextlib.suppress(ImportError):
        from optuna.exceptions import StorageInternalError

        kinds.append(StorageInternalError)
    return isinstance(error, tuple(kinds))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
