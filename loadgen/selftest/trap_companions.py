"""Disturbances while a tool runs: another client of the server, a wall clock that steps, half of the CPU time."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from loadgen.errors import MeasurementError
from loadgen.selftest.trap_behaviour import BATCH
from loadgen.selftest.trap_rows import Companion
from loadgen.target.machine import request_realtime

SOURCE = Path(__file__).with_name("shifted_clock.c")
STEP_S = 5.0
STEP_AFTER_S = 5.0
POLL_S = 0.1
# Half of the time stopped, in turns of 10 ms.
TURN_S = 0.010
TIME_LIMIT_S = 600.0
OTHER_TOKENS = 64


def run_tool(
    words: Sequence[str], url: str, companion: Companion | None, folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a tool's command at the same time as its companion. Raises MeasurementError if it does not end in time."""
    environment = dict(environment)
    step_file = folder / "step"
    if companion is Companion.CLOCK_STEP:
        step_file.write_bytes(bytes(16))
        environment |= {"LD_PRELOAD": str(build_shifted_clock(folder)), "SHIFTED_CLOCK_FILE": str(step_file)}
    with (folder / "tool.log").open("w+") as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=folder
        )
        disturb: Mapping[Companion | None, Callable[[], contextlib.AbstractContextManager[None]]] = {
            Companion.OTHER_CLIENT: lambda: other_client(url),
            Companion.CLOCK_STEP: lambda: clock_step(url, step_file),
            Companion.STARVED: lambda: starved(process.pid),
            None: contextlib.nullcontext,
        }
        try:
            with disturb[companion]():
                exit_code = process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"{words[0]} did not end within {TIME_LIMIT_S:.0f} s") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return subprocess.CompletedProcess(words, exit_code, log.read())


@contextlib.contextmanager
def repeated(action: Callable[[threading.Event], None], count: int = 1) -> Iterator[None]:
    """Run an action in threads; it returns when the event is set."""
    stop = threading.Event()
    threads = [threading.Thread(target=action, args=(stop,), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def other_client(url: str) -> contextlib.AbstractContextManager[None]:
    """`BATCH` more streams on the server, one after the other."""
    address = urlsplit(url).netloc
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": OTHER_TOKENS, "stream": True})

    def send(stop: threading.Event) -> None:
        while not stop.is_set():
            connection = http.client.HTTPConnection(address, timeout=30)
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("POST", "/v1/chat/completions", body)
                connection.getresponse().read()
            connection.close()

    return repeated(send, BATCH)


def clock_step(url: str, step_file: Path) -> contextlib.AbstractContextManager[None]:
    """Step the shifted clock `STEP_AFTER_S` after the start of the load."""

    def step(stop: threading.Event) -> None:
        while not stop.wait(POLL_S):
            if (load_seconds(url) or 0.0) >= STEP_AFTER_S:
                with step_file.open("r+b") as file:
                    file.write(struct.pack("=qq", time.time_ns(), round(STEP_S * 1e9)))
                return

    return repeated(step)


def load_seconds(url: str) -> float | None:
    """Seconds since the server's load started; None before."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
    try:
        connection.request("GET", "/load")
        found = json.loads(connection.getresponse().read())["load_s"]
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return None if found is None else float(found)


def starved(pid: int) -> contextlib.AbstractContextManager[None]:
    """Stop the processes of a session half of the time."""

    def take_turns(stop: threading.Event) -> None:
        request_realtime(before_others=True)
        while not stop.is_set():
            members = session_members(pid)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for member in members:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member, number)
                time.sleep(TURN_S)

    return repeated(take_turns)


def session_members(session: int) -> list[int]:
    """The processes of a session, by /proc."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                members.append(int(path.parent.name))
    return members


def build_shifted_clock(folder: Path) -> Path:
    """Compile the shifted clock. Raises MeasurementError without a C compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise MeasurementError("the shifted clock needs a C compiler; none of cc, gcc and clang was found")
    library = folder / "shifted_clock.so"
    done = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], capture_output=True, text=True
    )
    if done.returncode:
        raise MeasurementError(f"the shifted clock could not be compiled: {done.stderr.strip()[-300:]}")
    return library
