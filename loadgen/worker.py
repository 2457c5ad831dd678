"""`python -m loadgen.worker`: the process that makes the load, with locust as a library.

Reads a `WorkerPlan` as JSON on stdin, writes records and its own health into the run directory, and says once a second
on stdout how far it is. SIGINT or SIGTERM: stop sending, drain, finish. One worker of several: joined.py.
"""

# locust first: it makes the sockets of everything imported after it cooperative.
import gevent
import locust
import locust.env
import locust.runners

# isort: split
import gc
import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gevent.event import Event
from gevent.lock import BoundedSemaphore

from loadgen import workload
from loadgen.config import BenchConfig
from loadgen.connection import ConnectionPool, Origin
from loadgen.conversations import Conversations
from loadgen.datasets.prompt import Limits
from loadgen.deal import Seat
from loadgen.exchange import Client
from loadgen.feed import Feed
from loadgen.health import ASKED_TO_STOP, UNHEALTHY_SIGNAL
from loadgen.hub_connection import HubConnection
from loadgen.load import NS_PER_S, Load, StopRules
from loadgen.machine import run_before_others
from loadgen.plan import WorkerPlan
from loadgen.protocols.dialects import DIALECTS
from loadgen.recorder import Recorder, RowSink, latest, live_row, quantile
from loadgen.self_monitor import TIMER_S, SelfMonitor
from loadgen.shapes import ConstantShape, Shape
from loadgen.tether import tie_to_parent
from loadgen.think_time import parse_think_time
from loadgen.timers import Ticker
from loadgen.users import ClosedLoopUser, LoadRunner, LoadUser, OpenLoopUser
from reports.records import RequestRecord, Status
from reports.results import REQUESTS, TIMESERIES, JsonlWriter, write_client

POLL_S = 0.02
PREPARE_CLOSED = 1_024
# A generator that stood still for so long has spoiled its run: metrics.md calls it invalid.
MAX_LOOP_GAP_S = 5.0


class UsersOverTime(locust.LoadTestShape):  # type: ignore[misc]
    """locust's view of one of our shapes."""

    shape: Shape
    abstract = True

    def tick(self) -> tuple[int, float] | None:
        users = self.shape.users(self.get_run_time())
        return users, float(max(users, 1))


def main() -> int:
    plan = WorkerPlan.from_json(json.load(sys.stdin))
    if not tie_to_parent(plan.parent_pid, signal.SIGKILL):
        return 1
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("locust").setLevel(logging.ERROR)
    _work_alone(plan)
    return 0


def _work_alone(plan: WorkerPlan) -> None:
    directory = Path(plan.directory)
    records, series = (JsonlWriter(directory / f"{table}.jsonl") for table in (REQUESTS, TIMESERIES))
    worker = Worker(plan, Seat(), Outlet(records, series, say))
    worker.take_signals()
    runner = _start_locust(worker)
    worker.users.begun.wait()
    load = worker.load
    say(type="started", start_ns=load.start_ns, wall_s=time.time(), at_ns=time.perf_counter_ns())
    end, health = worker.follow()
    runner.quit()
    write_client(directory, {**end, "write_errors": load.write_errors, "workers": [health]})
    say(type="done", **end)


def _start_locust(worker: "Worker") -> "locust.runners.Runner":
    is_open_loop = worker.config.is_open_loop
    environment = locust.env.Environment(user_classes=[OpenLoopUser if is_open_loop else ClosedLoopUser])
    if not is_open_loop:
        shape = UsersOverTime()
        shape.shape = ConstantShape(worker.config.users)
        environment.shape_class = shape
    runner = environment.create_local_runner()
    if is_open_loop:
        runner.start(1, spawn_rate=1)
    else:
        runner.start_shape()
    return runner


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where a worker's records, its seconds and its messages go; a master is told single latencies as well."""

    records: RowSink
    series: RowSink
    say: Callable[..., None]
    is_to_master: bool = False


class Worker:
    """One worker's load, from the first request to the last record."""

    def __init__(
        self,
        plan: WorkerPlan,
        seat: Seat,
        outlet: Outlet,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        # What was imported lives as long as the process: no collection during the load need look through it.
        gc.collect()
        gc.freeze()
        self.outlet = outlet
        self.seat = seat
        self.monitor = SelfMonitor()
        self.is_over = Event()
        config = BenchConfig.model_validate(plan.config)
        self.config = config
        self.runs_before_others = config.priority == "auto" and run_before_others()
        work = workload.build(
            config, workload.vocabulary_from_json(plan.vocabulary), Limits(**plan.limits), plan.answer_tokens
        )
        self.work = work
        times_ns = None if work.times_ns is None else seat.times(work.times_ns)
        dialect = DIALECTS[plan.api](plan.sampling)
        self.feed = Feed(seat.prompts(work.prompts), dialect)
        self.feed.prepare(self._known_requests(times_ns))
        self.load = Load(
            run_id=plan.run_id,
            rules=self._rules(),
            feed=iter(self.feed),
            client=Client(
                ConnectionPool(Origin.parse(plan.url), time.perf_counter_ns, HubConnection),
                dialect,
                plan.headers,
                config.request_limits,
                time.perf_counter_ns,
            ),
            recorder=Recorder(outlet.records, on_record),
            clock_ns=time.perf_counter_ns,
            worker=seat.index,
            conversations=Conversations(dialect) if config.assistant == "real" else None,
        )
        self.users = LoadRunner(
            self.load,
            think_time=parse_think_time(config.think_time, config.seed),
            shape=None if config.is_open_loop or isinstance(config.shape, ConstantShape) else config.shape,
            seat=seat,
            times_ns=times_ns,
            end_reason="requests" if config.requests is not None else "end_of_trace",
            limit=BoundedSemaphore(seat.share_of(config.max_in_flight)) if config.max_in_flight else None,
        )
        LoadUser.runner = self.users

    def _known_requests(self, times_ns: list[int] | None) -> int:
        if times_ns is not None:
            return len(times_ns)
        known = self.config.requests or max(PREPARE_CLOSED, 4 * self.config.users)
        return self.seat.share_of(known)

    def _rules(self) -> StopRules:
        config = self.config
        requests = None if config.requests is None or config.is_open_loop else self.seat.share_of(config.requests)
        return StopRules(
            config.warmup_s,
            config.duration_s,
            requests=requests,
            slots=None if config.is_open_loop or config.mode == "stages" else config.concurrency,
            max_errors=config.max_errors,
            max_error_share=config.max_error_share,
        )

    def take_signals(self) -> None:
        """SIGINT and SIGTERM end the load in an orderly way; so does word that the server is gone."""
        for number in (signal.SIGINT, signal.SIGTERM):
            gevent.signal_handler(number, self.stop, "interrupted")
        gevent.signal_handler(UNHEALTHY_SIGNAL, self.stop, ASKED_TO_STOP)

    def stop(self, reason: str) -> None:
        """Send nothing more, and cut no answer short before the drain limit."""
        self.users.is_interrupted |= reason == "interrupted"
        self.load.stop(reason)
        self.users.begin()

    def follow(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Watch a load that has begun until it is drained: how it ended, and how this process was meanwhile."""
        ticker = Ticker(TIMER_S, self._tick)
        reporter = gevent.spawn(self._report_every_second)
        self.is_over.wait()
        self.outlet.say(type="stopping", reason=self.load.stop_reason)
        drained_s = self._drain()
        ticker.close()
        reporter.kill()
        self._report()
        self.outlet.records.close()
        self.outlet.series.close()
        return self._end(drained_s), self._health()

    def _drain(self) -> float:
        """Wait for what is in flight, up to the drain limit, and cut the rest. Returns the seconds it took."""
        started_ns = self.load.clock_ns()
        limit_ns = started_ns + round(self.config.drain_s * NS_PER_S)
        while (self.users.at_work or self.users.waiting) and self.load.clock_ns() < limit_ns:
            gevent.sleep(POLL_S)
        self.users.cut(Status.CANCELLED if self.users.is_interrupted else Status.UNFINISHED)
        return (self.load.clock_ns() - started_ns) / NS_PER_S

    def _tick(self, late_s: float) -> None:
        """One timer for the lag of the loop and for the phases of the load: idle wake-ups cost more than events."""
        self.monitor.note_timer(late_s)
        if late_s > MAX_LOOP_GAP_S:
            self.load.stop("client_limit")
        self.load.tick()
        if self.load.is_over:
            self.is_over.set()

    def _report_every_second(self) -> None:
        while True:
            gevent.sleep(1.0)
            self._report()

    def _report(self) -> None:
        load, live = self.load, self.load.recorder.live
        t_s = (load.clock_ns() - load.start_ns) / NS_PER_S
        row = {
            "t_s": t_s,
            "worker": self.seat.index,
            "in_flight": load.in_flight,
            "sent": live.sent,
            "completed": live.completed,
            "failed": live.failed,
            "tokens_out": load.tokens_seen(),
            "tokens_in": live.tokens_in,
            "ttft_p50_s": quantile(live.second_ttft_s, 0.50),
            "ttft_p95_s": quantile(live.second_ttft_s, 0.95),
            **self.monitor.second(),
        }
        try:
            self.outlet.series.write(row)
        except OSError as error:
            load.client_errors.append(f"the time series cannot be written: {error.strerror}")
            load.stop("no_space")
        progress = live_row(live, load.in_flight) | {"tokens_out": row["tokens_out"], "waiting": self.users.waiting}
        if self.outlet.is_to_master:
            progress |= {"errors": load.errors, **latest(live)}
        self.outlet.say(type="progress", t_s=t_s, phase=str(load.phase), statuses=dict(live.statuses), **progress)
        live.clear_second()

    def _end(self, drained_s: float) -> dict[str, Any]:
        load = self.load

        def since_start(at_ns: int | None) -> float | None:
            return None if at_ns is None else (at_ns - load.start_ns) / NS_PER_S

        return {
            "stop_reason": load.stop_reason,
            "warmup_ended_s": since_start(load.measure_ns),
            "window_end_s": since_start(load.window_end_ns),
            "drain_s": drained_s,
            "clipped": load.clipped.to_json(),
            "client_errors": load.client_errors[:20],
        }

    def _health(self) -> dict[str, Any]:
        return {
            "worker": self.seat.index,
            "is_lost": False,
            "runs_before_others": self.runs_before_others,
            **self.monitor.summary(),
        }


def say(**message: Any) -> None:
    """One line of JSON on stdout, for whoever started this process."""
    sys.stdout.write(json.dumps(message, allow_nan=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
