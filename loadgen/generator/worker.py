"""`python -m loadgen.generator.worker`: the process that makes the load, with locust as a library.

Reads a `WorkerPlan` as JSON on stdin, writes records and its own health into the run directory, and writes its progress
to stdout once a second. After the window the load goes on until the last request of the window has ended. SIGINT or
SIGTERM: stop sending, wait for the requests in flight, finish. One worker of several: group_worker.py.
"""

# First: it makes the sockets of everything imported after it cooperative.
from loadgen.generator.locust_import import locust

# isort: split
import gevent
import locust.env
import locust.runners

# isort: split
import gc
import itertools
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gevent.event import Event
from gevent.lock import BoundedSemaphore

from loadgen.config.bench_config import BenchConfig
from loadgen.dialects.dialect import Dialect
from loadgen.dialects.registry import open_dialect
from loadgen.dialects.structured_dialect import StructuredDialect
from loadgen.generator.load_state import LoadState
from loadgen.generator.load_window import NS_PER_S, LoadEnd, LoadWindow
from loadgen.generator.partition import Partition
from loadgen.generator.recorder import Recorder, RowSink, latest, live_row, quantile
from loadgen.generator.request_bodies import Conversations, PreparedRequests
from loadgen.generator.self_monitor import TIMER_S, SelfMonitor
from loadgen.generator.users import ClosedLoopUser, LoadRunner, LoadUser, OpenLoopUser
from loadgen.generator.worker_messages import END_SIGNAL, STOP_REQUESTED, STOP_SIGNAL, WorkerPlan
from loadgen.http.arrival_times import total_arrival_times
from loadgen.http.balancing import Replicas
from loadgen.http.call import Client
from loadgen.http.connection import ConnectionPool, Origin
from loadgen.http.hub_connection import HubConnection
from loadgen.http.timers import Ticker
from loadgen.http.tls import TlsSettings
from loadgen.parent_death import end_with_parent
from loadgen.target.machine import request_realtime
from loadgen.workloads import workload
from loadgen.workloads.departure import parse_departure
from loadgen.workloads.prompts.planned_cache import CacheFacts
from loadgen.workloads.prompts.prompt import ServerLimits
from loadgen.workloads.shapes import ConstantShape, Shape
from loadgen.workloads.structured import structure_of
from loadgen.workloads.think_time import parse_think_time
from reports.run_schema import RequestRecord, Status
from reports.run_store import REQUESTS, TIMESERIES, JsonlWriter, write_client

POLL_S = 0.02
PREPARED_CLOSED_LOOP, PREPARED_PER_S = 1_024, 100.0
# A longer gap of the event loop makes the run invalid.
MAX_LOOP_GAP_S = 5.0


class UsersOverTime(locust.LoadTestShape):  # type: ignore[misc]
    """locust's form of a `Shape`."""

    shape: Shape
    abstract = True

    def tick(self) -> tuple[int, float] | None:
        users = self.shape.users(self.get_run_time())
        return users, float(max(users, 1))


def main() -> int:
    plan = WorkerPlan.from_json(json.load(sys.stdin))
    if not end_with_parent(plan.parent_pid, signal.SIGKILL):
        return 1
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("locust").setLevel(logging.ERROR)
    _run_alone(plan)
    return 0


def _run_alone(plan: WorkerPlan) -> None:
    directory = Path(plan.directory)
    records, series = (JsonlWriter(directory / f"{table}.jsonl") for table in (REQUESTS, TIMESERIES))
    worker = Worker(plan, Partition(), WorkerOutput(records, series, print_message))
    worker.handle_signals()
    runner = _start_locust(worker)
    worker.users.begun.wait()
    load = worker.load
    print_message(type="started", start_ns=load.start_ns, wall_s=time.time(), at_ns=time.perf_counter_ns())
    end, health = worker.watch()
    runner.quit()
    write_client(directory, {**end, "write_errors": load.write_errors, "workers": [health]})
    print_message(type="done", **end)


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
class WorkerOutput:
    """The destinations of a worker's records, time series and messages; a master also receives single latencies."""

    records: RowSink
    series: RowSink
    send: Callable[..., None]
    is_to_master: bool = False


class Worker:
    """One worker's load, from the first request to the last record.

    With a master, `report_left` takes the number of its window's requests that have not ended, and the master ends the
    drain with `drained`.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        partition: Partition,
        output: WorkerOutput,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        # Imported objects live as long as the process, so collections during the load need not scan them.
        gc.collect()
        gc.freeze()
        self.output = output
        self.partition = partition
        self.monitor = SelfMonitor()
        self.window_ended, self.drained = Event(), Event()
        self.report_left: Callable[[int], None] | None = None
        self.is_interrupted = self._has_reported_stop = False
        config = BenchConfig.model_validate(plan.config)
        self.config = config
        self.runs_before_others = config.priority == "auto" and request_realtime()
        work = workload.build(
            config,
            workload.vocabulary_from_json(plan.vocabulary),
            ServerLimits(**plan.limits),
            plan.answer_tokens,
            CacheFacts(**plan.cache),
        )
        self.work = work
        structure = structure_of(config)
        dialect: Dialect = open_dialect(plan.api, plan.sampling)
        if structure is not None:
            dialect = StructuredDialect(dialect, plan.api, structure)
        self.requests = PreparedRequests(partition.prompts(work.planned()), dialect)
        self.requests.prepare(self._known_requests())
        self.replicas = Replicas(
            [self._client(plan, url, dialect) for url in (plan.url, *config.replicas)], config.balance, partition.index
        )
        self.load = LoadState(
            run_id=plan.run_id,
            window=LoadWindow(self._load_end()),
            requests=self.requests,
            client=self.replicas,
            recorder=Recorder(output.records, on_record),
            clock_ns=time.perf_counter_ns,
            worker=partition.index,
            conversations=Conversations(dialect) if config.assistant == "real" else None,
            structure=structure,
            departure=parse_departure(config.cancel, config.seed) if config.cancel else None,
        )
        schedule = work.schedule
        self.users = LoadRunner(
            self.load,
            think_time=parse_think_time(config.think_time, config.seed),
            shape=None if config.is_open_loop or isinstance(config.shape, ConstantShape) else config.shape,
            partition=partition,
            times_ns=() if schedule is None else partition.times(itertools.chain(schedule.times_ns, schedule.drain_ns)),
            limit=BoundedSemaphore(partition.share_of(config.max_in_flight)) if config.max_in_flight else None,
        )
        LoadUser.runner = self.users

    def _client(self, plan: WorkerPlan, url: str, dialect: Dialect) -> Client:
        pool = ConnectionPool(
            Origin.parse(url),
            time.perf_counter_ns,
            HubConnection,
            reuses=plan.reuses_connections,
            tls=TlsSettings(**plan.tls),
        )
        return Client(pool, dialect, plan.headers, self.config.request_limits, time.perf_counter_ns)

    def _known_requests(self) -> int:
        """The requests of the window, as far as they are known, and some of the drain."""
        later = max(self._soon_needed(), 4 * self.config.users)
        if self.work.times_ns is not None:
            known = len(self.work.times_ns) + (0 if self.config.mode == "burst" else later)
        else:
            known = (self.config.requests or 0) + later
        return self.partition.share_of(known)

    def _soon_needed(self) -> int:
        """Requests to prepare, of an unknown number; a short load needs few, and starts sooner with few."""
        if self.config.duration_s is None:
            return PREPARED_CLOSED_LOOP
        length_s = self.config.warmup_s + self.config.duration_s
        return min(PREPARED_CLOSED_LOOP, math.ceil(PREPARED_PER_S * length_s))

    def _load_end(self) -> LoadEnd:
        """The end of this worker's window. With several workers, the master counts the requests of a closed loop."""
        config, schedule, rows = self.config, self.work.schedule, self.work.num_prompts
        is_counting = schedule is None and self.partition.count == 1
        return LoadEnd(
            config.warmup_s,
            config.duration_s,
            requests=config.requests if is_counting else None,
            slots=None if config.is_open_loop or config.mode == "stages" else config.concurrency,
            rows=None if schedule is not None or rows is None else self.partition.share_of(rows),
            last_ns=None if schedule is None else schedule.end_ns,
            last_reason="requests" if config.requests is not None else "end_of_trace",
            max_errors=config.max_errors,
            max_error_share=config.max_error_share,
        )

    def handle_signals(self) -> None:
        """SIGINT, SIGTERM and STOP_SIGNAL stop the load; END_SIGNAL ends its window."""
        for number in (signal.SIGINT, signal.SIGTERM):
            gevent.signal_handler(number, self.stop, "interrupted")
        gevent.signal_handler(STOP_SIGNAL, self.stop, STOP_REQUESTED)
        gevent.signal_handler(END_SIGNAL, self.load.end_window, STOP_REQUESTED)

    def stop(self, reason: str) -> None:
        """Send nothing more; requests in flight may finish until the drain limit."""
        self.is_interrupted |= reason == "interrupted"
        self.load.stop(reason)
        self.users.begin()

    def watch(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Watch a load that has begun until it is drained. Returns how it ended, and the health of this process."""
        ticker = Ticker(TIMER_S, self._tick)
        reporter = gevent.spawn(self._report_every_second)
        self.window_ended.wait()
        drained_s = self._drain()
        ticker.close()
        reporter.kill()
        self._report()
        self.output.records.close()
        self.output.series.close()
        return self._end(drained_s), self._health()

    def _drain(self) -> float:
        """Keep the load up while requests of the window are in flight, then cancel the others.

        Ends at the drain limit at the latest; one worker of several goes on until the master ends the drain. A load
        that was stopped sends nothing more and waits for every request. Returns the seconds since the window's end.
        """
        load, ended_ns = self.load, self.load.window.end_ns or self.load.clock_ns()
        limit_ns = ended_ns + round(self.config.drain_s * NS_PER_S)
        while not self.drained.is_set():
            is_late = load.clock_ns() >= limit_ns
            if load.is_over:
                self._report_stop()
                if is_late or not (self.users.sending or self.users.waiting):
                    break
            elif self.report_left is not None:
                self.report_left(load.window.left)
            elif is_late or not load.window.left:
                break
            gevent.sleep(POLL_S)
        load.stop("drained")
        self.users.cancel(Status.CANCELLED if self.is_interrupted else Status.UNFINISHED)
        return (load.clock_ns() - ended_ns) / NS_PER_S

    def _report_stop(self) -> None:
        if not self._has_reported_stop:
            self._has_reported_stop = True
            self.output.send(type="stopping", reason=self.load.stopped_by)

    def _tick(self, late_s: float) -> None:
        """One timer for loop lag and for the phases of the load: idle wake-ups cost more than events."""
        self.monitor.note_timer(late_s)
        if late_s > MAX_LOOP_GAP_S:
            self.load.stop("client_limit")
        self.load.tick()
        if self.load.stop_reason is not None:
            self.window_ended.set()

    def _report_every_second(self) -> None:
        while True:
            gevent.sleep(1.0)
            self._report()

    def _report(self) -> None:
        load, live = self.load, self.load.recorder.live
        t_s = (load.clock_ns() - load.start_ns) / NS_PER_S
        row = {
            "t_s": t_s,
            "worker": self.partition.index,
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
            self.output.series.write(row)
        except OSError as error:
            load.client_errors.append(f"cannot write the time series: {error.strerror}")
            load.stop("no_space")
        progress = live_row(live, load.in_flight) | {"tokens_out": row["tokens_out"], "waiting": self.users.waiting}
        if self.output.is_to_master:
            progress |= {"errors": load.errors, **latest(live)}
        self.output.send(type="progress", t_s=t_s, phase=str(load.phase), statuses=dict(live.statuses), **progress)
        live.clear_second()

    def _end(self, drained_s: float) -> dict[str, Any]:
        load = self.load

        def since_start(at_ns: int | None) -> float | None:
            return None if at_ns is None else (at_ns - load.start_ns) / NS_PER_S

        return {
            "stop_reason": load.stop_reason,
            "warmup_ended_s": since_start(load.window.measure_ns),
            "window_end_s": since_start(load.window.end_ns),
            "drain_s": drained_s,
            "clipped": load.clipped.to_json(),
            "client_errors": load.client_errors[:20],
        }

    def _health(self) -> dict[str, Any]:
        return {
            "worker": self.partition.index,
            "is_lost": False,
            "runs_before_others": self.runs_before_others,
            "arrival_times": total_arrival_times(
                {"arrival_times": each.pool.arrivals.to_json()} for each in self.replicas.clients
            ),
            **self.monitor.summary(),
        }


def print_message(**message: Any) -> None:
    """Write a message to stdout as one line of JSON."""
    sys.stdout.write(json.dumps(message, allow_nan=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
