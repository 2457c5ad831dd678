"""Starts a server command in its own process group, with free ports in its environment, and stops the group."""

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadgen.errors import StartError, UsageError

STOP_S = 30.0
LOG_TAIL_LINES = 30
MAX_ATTEMPTS = 5
PORT_VARIABLES = ("PORT", "MASTER_PORT", "PROMETHEUS_PORT")
ADDRESS_IN_USE = ("address already in use", "address in use", "errno 98")


def split_command(command: str | Sequence[str]) -> list[str]:
    """The words of a command line. Raises UsageError."""
    if not isinstance(command, str):
        return list(command)
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"`server` is {command!r}: {error}") from error
    if not words:
        raise UsageError("`server` is empty; give the command that starts the server")
    return words


def find_launcher() -> str:
    """The path of text-generation-launcher: in the folder of this Python, else on PATH. Raises UsageError."""
    if importlib.util.find_spec("grpc") is None:
        raise UsageError(
            "the bundled server is not installed: pip install 'tgi-bench[server]', or give --url or --server"
        )
    installed = Path(sys.executable).with_name("text-generation-launcher")
    found = str(installed) if installed.exists() else shutil.which("text-generation-launcher")
    if found is None:
        raise UsageError(
            "text-generation-launcher is not installed; give --url or --server, or install tgi-bench[server]"
        )
    return found


def port_in(argv: Sequence[str]) -> int | None:
    """The port that a command sets.

    >>> port_in(["server", "--port", "80"]), port_in(["server", "--port=81"]), port_in(["server"])
    (80, 81, None)
    """
    port = None
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        value = following if word == "--port" else word.removeprefix("--port=") if word.startswith("--port=") else ""
        if value.isdigit():
            port = int(value)
    return port


class LaunchedProcess:
    """One server process and its group. `argv` is the command with ports filled in."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.command = list(command)
        self.log = log
        self.argv: list[str] = list(command)
        self.port = 0
        self.attempts_left = MAX_ATTEMPTS
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start the command on free ports. Raises StartError."""
        self.attempts_left -= 1
        named = port_in(self.command)
        if named is not None and is_listened_on(named):
            # Otherwise that server would be measured.
            raise StartError(f"port {named} of the command is in use by another server")
        with contextlib.ExitStack() as stack:
            ports = dict(zip(PORT_VARIABLES, reserve_ports(stack, len(PORT_VARIABLES)), strict=True))
            self.port = named or ports["PORT"]
            ports["PORT"] = self.port
            self.argv = [word.replace("{port}", str(self.port)) for word in self.command]
            self._remove_sockets()
            remove_stale_folders(Path(tempfile.gettempdir()))
            # A short path: socket names are limited to 108 bytes.
            self._sockets = tempfile.TemporaryDirectory(prefix=f"tgi-{os.getpid()}-", ignore_cleanup_errors=True)
            environment = {
                **os.environ,
                **{name: str(port) for name, port in ports.items()},
                "HOSTNAME": "127.0.0.1",
                "SHARD_UDS_PATH": str(Path(self._sockets.name) / "shard"),
                **self._environment,
            }
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "loadgen.parent_death", str(os.getpid()), *self.argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise StartError(f"cannot start {self.argv[0]!r}: {error.strerror}") from error

    def check_alive(self) -> None:
        """Raises StartError if the process has ended."""
        code = self.exit_code
        if code is not None:
            raise StartError(f"the server ended with exit code {code} before it was ready", self.log_tail())

    def log_tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self.log.read_bytes().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])

    @property
    def port_was_taken(self) -> bool:
        """Whether the log reports an address in use; always False if the command sets its port."""
        return port_in(self.command) is None and any(text in self.log_tail().lower() for text in ADDRESS_IN_USE)

    def stop(self) -> None:
        """Terminate the group; kill it after `STOP_S`, or at once if interrupted again."""
        if self._process is None:
            return
        try:
            self._signal_group(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill what is left of the group."""
        if self._process is not None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()
        self._remove_sockets()

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _remove_sockets(self) -> None:
        if self._sockets is not None:
            self._sockets.cleanup()
            self._sockets = None


def remove_stale_folders(temporary: Path) -> None:
    """Remove the socket folders of this user's processes that were killed: their names have the process id."""
    for folder in temporary.glob("tgi-*-*"):
        pid = folder.name.split("-")[1]
        with contextlib.suppress(OSError):
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
                shutil.rmtree(folder, ignore_errors=True)


def is_listened_on(port: int) -> bool:
    """Whether a port of the loopback interface accepts connections."""
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(("127.0.0.1", port)) == 0


def reserve_ports(stack: contextlib.ExitStack, count: int) -> list[int]:
    """Free ports of the loopback interface, reserved until `stack` is closed."""
    ports = []
    for _ in range(count):
        sock = stack.enter_context(socket.socket())
        sock.bind(("127.0.0.1", 0))
        ports.append(int(sock.getsockname()[1]))
    return ports
