"""`python -m loadgen.joined`: one worker of several, on locust's own worker runner; told its load by a master.

Reads a `JoinPlan` as JSON on stdin. A worker that its master started writes its records beside the master's; one that
joined from elsewhere sends them in batches. What passes between the two: messages.py.
"""

# locust first: it makes the sockets of everything imported after it cooperative.
import gevent
import locust.env
import locust.runners

# isort: split
import dataclasses
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

from loadgen.deal import Seat
from loadgen.load_files import unpack
from loadgen.messages import SAID, TOLD, Hello
from loadgen.plan import JoinPlan, WorkerPlan
from loadgen.recorder import RowSink, tpot_of, ttft_of
from loadgen.tether import tie_to_parent
from loadgen.users import ClosedLoopUser, OpenLoopUser
from loadgen.worker import Outlet, Worker, say
from reports.records import RequestRecord
from reports.results import REQUESTS, TIMESERIES, JsonlWriter

SEND_ROWS_S = 0.5
# locust's heartbeats come every second.
MASTER_SILENCE_S = 15.0
END_S = 30.0
LEAVE_S = 5.0

logger = logging.getLogger(__name__)


def main() -> int:
    plan = JoinPlan(**json.load(sys.stdin))
    if not tie_to_parent(plan.parent_pid, signal.SIGKILL):
        return 1
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("locust").setLevel(logging.ERROR)
    try:
        return Joined(plan).run()
    except ConnectionError:
        say(type="failed", text=f"no master answers at {plan.host}:{plan.port}")
        return 1


class RowSender:
    """Sends the rows of one table to the master, many at a time."""

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


class Joined:
    """A worker from its hello to its master's last word."""

    def __init__(self, plan: JoinPlan) -> None:
        self._plan = plan
        self._is_local = plan.directory is not None
        self._answer: AsyncResult[dict[str, Any]] = AsyncResult()
        self._ended = Event()
        self._worker: Worker | None = None
        self._files = tempfile.TemporaryDirectory(prefix="tgi-bench-", ignore_cleanup_errors=True)
        environment = locust.env.Environment(user_classes=[ClosedLoopUser, OpenLoopUser])
        self._stats = environment.stats
        self._runner = environment.create_worker_runner(plan.host, plan.port)
        self._stats = environment.stats
        self._runner.register_message(TOLD, self._take)

    def run(self) -> int:
        """Take part in one load. Returns the exit code."""
        self._say(type="hello", **dataclasses.asdict(Hello.of_this_process(self._plan.key, self._plan.seat)))
        watch = gevent.spawn(self._watch_master)
        try:
            told = self._answer.get()
            if told["type"] != "plan":
                self._tell_command(type="failed", text=str(told.get("reason")))
                return 1
            return self._work(told)
        finally:
            watch.kill()
            # Its listener first: on a closed socket it would spin.
            self._runner.user_greenlets.kill(block=True, timeout=LEAVE_S)
            self._runner.greenlet.kill(block=True, timeout=LEAVE_S)
            self._runner.client.close(linger=1_000)
            self._files.cleanup()

    def _work(self, told: dict[str, Any]) -> int:
        self._tell_command(type="joined", index=told["index"], count=told["count"])
        try:
            worker = self._worker = self._make_worker(told)
        except Exception as error:
            logger.exception("the load cannot be made here")
            self._say(type="failed", text=f"{type(error).__name__}: {error}")
            self._ended.wait(END_S)
            self._tell_command(type="failed", text=str(error))
            return 1
        self._say(type="ready", workload_hash=worker.work.digest, schedule_hash=worker.work.schedule_hash)
        worker.users.begun.wait()
        end, health = worker.follow()
        self._say(type="done", end=end, health=health)
        is_heard = self._ended.wait(END_S)
        if end["stop_reason"] == "master_lost" or not is_heard:
            self._tell_command(type="failed", text="the master was lost; what had not reached it is gone")
            return 1
        self._tell_command(type="done", **end)
        return 0

    def _make_worker(self, told: dict[str, Any]) -> Worker:
        plan = WorkerPlan.from_json(told["plan"])
        config = plan.config | unpack(told["files"], Path(self._files.name))
        seat = Seat(told["index"], told["count"])
        records, series = (self._sink(table, seat) for table in (REQUESTS, TIMESERIES))
        on_record = self._show if told["is_watched"] else None
        outlet = Outlet(records, series, self._say, is_to_master=True)
        worker = Worker(dataclasses.replace(plan, config=config), seat, outlet, on_record)
        worker.users.is_gated = True
        worker.load.on_warm = lambda at_ns: self._say(type="warm", at_ns=at_ns)
        worker.take_signals()
        return worker

    def _sink(self, table: str, seat: Seat) -> RowSink:
        if self._plan.directory is not None:
            return JsonlWriter(Path(self._plan.directory) / f"{table}-{seat.index}.jsonl")
        sender = RowSender(table, self._say)
        gevent.spawn(self._flush_often, sender)
        return sender

    def _flush_often(self, sender: RowSender) -> None:
        while True:
            gevent.sleep(SEND_ROWS_S)
            sender.flush()

    def _show(self, record: RequestRecord) -> None:
        """A record as two rows of locust's own table, beside its requests and outside of their total."""
        for name, value_s in (("TTFT", ttft_of(record)), ("TPOT", tpot_of(record))):
            if value_s is not None:
                self._stats.get(name, "LLM").log(value_s * 1e3, 0)

    def _take(self, environment: object, msg: Any) -> None:  # noqa: ARG002 - locust's signature
        told: dict[str, Any] = msg.data
        worker = self._worker
        match told["type"]:
            case "plan" | "refused":
                self._answer.set(told)
            case "ping":
                self._say(type="pong", number=told["number"], at_ns=time.perf_counter_ns())
            case "start" if worker is not None:
                self._take_slots(worker)
                worker.users.begin(told["start_ns"])
            case "measure" if worker is not None:
                worker.load.measure_from(told["at_ns"])
            case "stop" if worker is not None:
                worker.stop(told["reason"])
            case "end":
                self._ended.set()
                self._answer.set({"type": "refused", "reason": "the master ended before the load began"})
                if worker is not None:
                    worker.stop("interrupted")

    def _take_slots(self, worker: Worker) -> None:
        """Where every user has an answer before a warm-up is over: those that the master dealt this worker."""
        rules = worker.load.rules
        if rules.slots is not None:
            worker.load.rules = dataclasses.replace(rules, slots=self._runner.user_count)

    def _watch_master(self) -> None:
        while True:
            gevent.sleep(1.0)
            heard_s = self._runner.last_heartbeat_timestamp
            if heard_s is not None and time.time() - heard_s > MASTER_SILENCE_S:
                self._ended.set()
                self._answer.set({"type": "refused", "reason": "the master was lost"})
                if self._worker is not None:
                    self._worker.stop("master_lost")

    def _say(self, **message: Any) -> None:
        if message["type"] == "progress":
            self._tell_command(**{name: value for name, value in message.items() if name not in ("ttfts_s", "tpots_s")})
        self._runner.send_message(SAID, message)

    def _tell_command(self, **message: Any) -> None:
        """A line for the command that started a worker which joined from elsewhere."""
        if not self._is_local:
            say(**message)


if __name__ == "__main__":
    sys.exit(main())
