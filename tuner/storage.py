"""Where a study is kept: a journal file by default, a database, or a proxy in front of one."""

import contextlib
import importlib.util
import logging
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage, run_grpc_proxy_server
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from tuner.errors import StorageLostError, StudyError

JOURNAL_FILE = "journal.log"
# Drivers of the two databases, in the order in which they are looked for.
DRIVERS = {
    "postgresql": ("psycopg", "psycopg2", "pg8000"),
    "mysql": ("pymysql", "MySQLdb"),
}
RETRY_S = 60.0
LONGEST_PAUSE_S = 8.0
Answer = TypeVar("Answer")
logger = logging.getLogger(__name__)


def open_storage(text: str, folder: Path) -> BaseStorage:
    """The storage that a space file names. Raises StudyError naming what is wrong or missing."""
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
                raise StudyError(f"`storage` is {text!r}, but a proxy is named grpc://HOST:PORT")
            _check_grpc()
            with stable_warnings():
                return GrpcStorageProxy(host=host, port=int(port))
    raise StudyError(
        f"`storage` is {text!r}, not journal, journal:PATH, sqlite:PATH, postgresql://..., mysql://... or grpc://HOST:PORT"
    )


def serve_storage(storage: BaseStorage, host: str, port: int, on_ready: Callable[[], None]) -> None:
    """Let the workers of other machines reach a database as grpc://HOST:PORT; returns when the process is told to end.

    Raises StudyError where the port is taken or no proxy is installed.
    """
    _check_grpc()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StudyError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    on_ready()
    with stable_warnings():
        run_grpc_proxy_server(storage, host=host, port=port)


def _check_grpc() -> None:
    if importlib.util.find_spec("grpc") is None:
        raise StudyError("a storage proxy needs grpcio: pip install 'tgi-bench[server]'")


@contextlib.contextmanager
def stable_warnings() -> Iterator[None]:
    """Without Optuna's notes that an interface may change: the releases we support are pinned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _journal(path: Path) -> BaseStorage:
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))


def _database(url: str) -> BaseStorage:
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return RDBStorage(url)
    except (SQLAlchemyError, OSError) as error:
        raise StorageLostError(f"the storage {redacted(url)} cannot be opened: {_first_line(error)}") from error


def _with_driver(kind: str, rest: str) -> str:
    """The URL with a driver that is installed.

    Raises StudyError naming those that would do.
    """
    driver = next((name for name in DRIVERS[kind] if importlib.util.find_spec(name)), None)
    if driver is None:
        raise StudyError(f"a {kind} storage needs one of {', '.join(DRIVERS[kind])}: pip install {DRIVERS[kind][0]}")
    return f"{kind}+{driver.lower()}:{rest}"


def redacted(url: str) -> str:
    """A storage's address without its password.

    >>> redacted("postgresql://me:secret@db/studies")
    'postgresql://me:***@db/studies'
    """
    scheme, separator, rest = url.partition("://")
    account, at, place = rest.rpartition("@")
    if not at or ":" not in account:
        return url
    return f"{scheme}{separator}{account.partition(':')[0]}:***@{place}"


def patiently(
    call: Callable[[], Answer],
    *,
    sleep: Callable[[float], None] = time.sleep,
    now_s: Callable[[], float] = time.monotonic,
) -> Answer:
    """The answer of a storage, asked again with growing pauses for a minute while it cannot be reached.

    Raises StorageLostError after that; what was measured lies in the study's folder.
    """
    deadline_s, pause_s = now_s() + RETRY_S, 0.5
    while True:
        try:
            return call()
        except Exception as error:
            if not _is_lost(error):
                raise
            if now_s() + pause_s > deadline_s:
                raise StorageLostError(f"the study's storage was lost: {_first_line(error)}") from error
            logger.warning("the study's storage does not answer, asking again: %s", _first_line(error))
        sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _is_lost(error: Exception) -> bool:
    """Whether an exception says that the storage cannot be reached, rather than that the call was wrong."""
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
