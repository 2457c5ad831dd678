"""`python -m loadgen.generator.distributed.group_worker`: one of several workers, on locust's worker runner.

Reads a `JoinPlan` as JSON on stdin. A worker that the master started writes its records into the run directory; a
worker that joined from another machine sends them in batches. worker_messages.py has the messages.
"""

# First: it makes the sockets of everything imported after it cooperative.
from loadgen.generator.locust_import import locust

# isort: split
import gevent
import locust.env
import locust.runners

# isort: split
import dataclasses
import functools
import json
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gevent.event import AsyncResult, Event
from locust.rpc.protocol import Message

from loadgen.config.distribution import JOIN_KEY_VARIABLE
from loadgen.generator.distributed.encrypted_sockets import EncryptedClient
from loadgen.generator.partition import Partition
from loadgen.generator.recorder import RowSink, tpot_of, ttft_of
from loadgen.generator.users import ClosedLoopUser, OpenLoopUser
from loadgen.generator.worker import Worker, WorkerOutput, print_message
from loadgen.generator.worker_messages import (
    FROM_WORKER,
    TO_WORKER,
    Hello,
    JoinPlan,
    WorkerPlan,
    names_file,
    unpack_files,
)
from loadgen.parent_death import end_with_parent
from reports.run_schema import RequestRecord
from reports.run_store import REQUESTS, TIMESERIES, JsonlWriter

SEND_ROWS_S = 0.5
SEND_STARTS_S = 0.05
# locust's heartbeats come every second.
MASTER_SILENCE_S = 15.0
END_S = 30.0
EXIT_S = 5.0
CONNECT_S = 300.0
CONNECT_POLLS, CONNECT_POLL_S = 50, 0.1

logger = logging.getLogger(__name__)


def main() -> int:
    plan = JoinPlan(**json.load(sys.stdin))
    if not end_with_parent(plan.parent_pid, signal.SIGKILL):
        return 1
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("locust").setLevel(logging.ERROR)
    try:
        return GroupWorker(plan).run()
    except ConnectionError as error:
        print_message(type="failed", text=f"{error} at {plan.host}:{plan.port}")
        return 1


class JoiningRunner(locust.runners.WorkerRunner):  # type: ignore[misc]
    """locust's worker. A connection that the master refuses is not tried again."""

    def connect_to_master(self) -> None:
        """Raises ConnectionError with the reason."""
        reason = self._connected_or_reason()
        if reason is not None:
            # The listener first: on a closed socket it would spin.
            self.greenlet.kill(block=True, timeout=EXIT_S)
            self.client.close(linger=0)
            raise ConnectionError(reason)
        self.connected = True

    def _connected_or_reason(self) -> str | None:
        deadline_s = time.monotonic() + CONNECT_S
        while time.monotonic() < deadline_s:
            self.client.send(Message("client_ready", locust.runners.__version__, self.client_id))
            for _ in range(CONNECT_POLLS):
                if self.connection_event.wait(timeout=CONNECT_POLL_S):
                    return None
                if self.client.is_refused():
                    return f"wrong key: {JOIN_KEY_VARIABLE} is not the key of the master"
        return "no master answers"


class RowSender:
    """Sends the rows of one table to the master in batches."""

    def __init__(self, table: str, send: Callable[..., None]) -> None:
        self._table = table
        self._send = send
        self._lines: list[str] = []

    def write(self, row: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(row, separators=(",", ":"), allow_nan=False))

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._send(type="rows", table=self._table, lines=lines)

    def close(self) -> None:
        self.flush()


class GroupWorker:
    """A worker from its hello to the master's end message."""

    def __init__(self, plan: JoinPlan) -> None:
        self._plan = plan
        self._is_local = plan.directory is not None
        self._answer: AsyncResult[dict[str, Any]] = AsyncResult()
        self._ended = Event()
        self._worker: Worker | None = None
        self._reported_left: int | None = None
        self._files = tempfile.TemporaryDirectory(prefix="tgi-bench-", ignore_cleanup_errors=True)
        environment = locust.env.Environment(user_classes=[ClosedLoopUser, OpenLoopUser])
        # locust's runner makes its own socket, from this name.
        locust.runners.rpc.Client = functools.partial(EncryptedClient, key=plan.key)
        self._runner = environment.runner = JoiningRunner(environment, plan.host, plan.port)
        self._stats = environment.stats
        self._runner.register_message(TO_WORKER, self._receive)

    def run(self) -> int:
        """Work for one load. Returns the exit code."""
        self._send(type="hello", **dataclasses.asdict(Hello.of_this_process(self._plan.index)))
        watch = gevent.spawn(self._watch_master)
        try:
            answer = self._answer.get()
            if answer["type"] != "plan":
                self._print_if_remote(type="failed", text=str(answer.get("reason")))
                return 1
            return self._work(answer)
        finally:
            watch.kill()
            # The listener first: on a closed socket it would spin.
            self._runner.user_greenlets.kill(block=True, timeout=EXIT_S)
            self._runner.greenlet.kill(block=True, timeout=EXIT_S)
            self._runner.client.close(linger=1_000)
            self._files.cleanup()

    def _work(self, message: dict[str, Any]) -> int:
        self._print_if_remote(type="joined", index=message["index"], count=message["count"])
        try:
            worker = self._worker = self._make_worker(message)
        except Exception as error:
            logger.exception("cannot make the load on this machine")
            self._send(type="failed", text=f"{type(error).__name__}: {error}")
            self._ended.wait(END_S)
            self._print_if_remote(type="failed", text=str(error))
            return 1
        self._send(type="ready", workload_hash=worker.work.digest, schedule_hash=worker.work.schedule_hash)
        worker.users.begun.wait()
        end, health = worker.watch()
        self._send(type="done", end=end, health=health)
        has_ended = self._ended.wait(END_S)
        if end["stop_reason"] == "master_lost" or not has_ended:
            self._print_if_remote(
                type="failed", text="the connection to the master was lost; records that it had not received are lost"
            )
            return 1
        self._print_if_remote(type="done", **end)
        return 0

    def _make_worker(self, message: dict[str, Any]) -> Worker:
        plan = WorkerPlan.from_json(message["plan"])
        config = plan.config | unpack_files(message["files"], Path(self._files.name))
        kept = [name for name in plan.config if names_file(name, plan.config[name]) and name not in message["files"]]
        if kept and not self._is_local:
            raise ValueError(f"the master sent no file for {', '.join(kept)}: a path of this machine is not read")
        partition = Partition(message["index"], message["count"])
        records, series = (self._sink(table, partition) for table in (REQUESTS, TIMESERIES))
        on_record = self._show if message["is_watched"] else None
        output = WorkerOutput(records, series, self._send, is_to_master=True)
        worker = Worker(dataclasses.replace(plan, config=config), partition, output, on_record)
        worker.users.is_gated = True
        worker.load.window.on_warm = lambda at_ns: self._send(type="warm", at_ns=at_ns)
        worker.report_left = self._report_left
        if worker.config.requests is not None and not worker.config.is_open_loop:
            worker.load.window.starts = []
            gevent.spawn(self._send_starts, worker)
        worker.handle_signals()
        return worker

    def _sink(self, table: str, partition: Partition) -> RowSink:
        if self._plan.directory is not None:
            return JsonlWriter(Path(self._plan.directory) / f"{table}-{partition.index}.jsonl")
        sender = RowSender(table, self._send)
        gevent.spawn(self._flush_often, sender)
        return sender

    def _flush_often(self, sender: RowSender) -> None:
        while True:
            gevent.sleep(SEND_ROWS_S)
            sender.flush()

    def _report_left(self, left: int) -> None:
        """Report the requests left of the window whenever their number has changed."""
        if left != self._reported_left:
            self._reported_left = left
            self._send(type="draining", left=left)

    def _send_starts(self, worker: Worker) -> None:
        """Report the starts of requests, which the master counts, until the window has ended."""
        load = worker.load
        while load.stop_reason is None:
            if load.start_ns:
                self._send(type="starts", starts_ns=load.window.take_starts(), until_ns=load.clock_ns())
            gevent.sleep(SEND_STARTS_S)

    def _show(self, record: RequestRecord) -> None:
        """Show a record as two rows of locust's table, outside of the total of requests."""
        for name, value_s in (("TTFT", ttft_of(record)), ("TPOT", tpot_of(record))):
            if value_s is not None:
                self._stats.get(name, "LLM").log(value_s * 1e3, 0)

    def _receive(self, environment: object, msg: Any) -> None:  # noqa: ARG002 - locust's signature
        message: dict[str, Any] = msg.data
        worker = self._worker
        match message["type"]:
            case "plan" | "refused":
                self._answer.set(message)
            case "ping":
                self._send(type="pong", number=message["number"], at_ns=time.perf_counter_ns())
            case "start" if worker is not None:
                self._set_slots(worker)
                worker.users.begin(message["start_ns"])
            case "measure" if worker is not None:
                worker.load.window.measure_from(message["at_ns"])
            case "end_window" if worker is not None:
                worker.load.window.end(message["reason"], message["at_ns"])
            case "drained" if worker is not None:
                worker.drained.set()
            case "stop" if worker is not None:
                worker.stop(message["reason"])
            case "end":
                self._ended.set()
                self._answer.set({"type": "refused", "reason": "the master ended before the load began"})
                if worker is not None:
                    worker.stop("interrupted")

    def _set_slots(self, worker: Worker) -> None:
        """If the warm-up waits for every user, wait for those that the master assigned to this worker."""
        limits = worker.load.limits
        if limits.slots is not None:
            worker.load.window.limits = dataclasses.replace(limits, slots=self._runner.user_count)

    def _watch_master(self) -> None:
        while True:
            gevent.sleep(1.0)
            heartbeat_s = self._runner.last_heartbeat_timestamp
            if heartbeat_s is not None and time.time() - heartbeat_s > MASTER_SILENCE_S:
                self._ended.set()
                self._answer.set({"type": "refused", "reason": "the connection to the master was lost"})
                if self._worker is not None:
                    self._worker.stop("master_lost")

    def _send(self, **message: Any) -> None:
        if message["type"] == "progress":
            self._print_if_remote(
                **{name: value for name, value in message.items() if name not in ("ttfts_s", "tpots_s")}
            )
        self._runner.send_message(FROM_WORKER, message)

    def _print_if_remote(self, **message: Any) -> None:
        """Print a message for the command that joined from another machine."""
        if not self._is_local:
            print_message(**message)


if __name__ == "__main__":
    sys.exit(main())
