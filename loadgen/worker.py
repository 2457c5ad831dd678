"""`python -m loadgen.worker`: the process that makes the load, with locust as a library.

Reads a `WorkerPlan` as JSON on stdin, writes records and its own health into the run directory, and says once a second
on stdout how far it is. SIGINT or SIGTERM: stop sending, drain, finish.
"""

# locust first: it makes the sockets of everything imported after it cooperative.
import gevent
import locust
import locust.env
import locust.runners

# isort: split
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gevent.lock import BoundedSemaphore

from loadgen import workload
from loadgen.config import BenchConfig
from loadgen.connection import ConnectionPool, Origin
from loadgen.datasets.prompt import Limits
from loadgen.exchange import Client
from loadgen.feed import Feed
from loadgen.health import UNHEALTHY_SIGNAL
from loadgen.load import NS_PER_S, Load, StopRules
from loadgen.machine import run_before_others
from loadgen.plan import WorkerPlan
from loadgen.protocols.dialects import DIALECTS
from loadgen.recorder import Recorder, live_row, quantile
from loadgen.self_monitor import TIMER_S, SelfMonitor
from loadgen.shapes import ConstantShape, Shape
from loadgen.tether import tie_to_parent
from loadgen.users import ClosedLoopUser, LoadRunner, LoadUser, OpenLoopUser
from reports.results import JsonlWriter, Status, write_client

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
    Worker(plan).run()
    return 0


class Worker:
    """One load, from the first request to the last record."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.directory = Path(plan.directory)
        self.monitor = SelfMonitor()
        config = BenchConfig.model_validate(plan.config)
        self.config = config
        self.runs_before_others = False
        work = workload.build(
            config, workload.vocabulary_from_json(plan.vocabulary), Limits(**plan.limits), plan.answer_tokens
        )
        dialect = DIALECTS[plan.api](plan.sampling)
        self.feed = Feed(iter(work.prompts), dialect)
        self.feed.prepare(self._known_requests(work))
        self.records = JsonlWriter(self.directory / "requests.jsonl")
        self.series = JsonlWriter(self.directory / "timeseries.jsonl")
        self.load = Load(
            run_id=plan.run_id,
            rules=self._rules(),
            feed=iter(self.feed),
            client=Client(
                ConnectionPool(Origin.parse(plan.url), time.perf_counter_ns),
                dialect,
                plan.headers,
                config.timeout,
                time.perf_counter_ns,
            ),
            recorder=Recorder(self.records),
            clock_ns=time.perf_counter_ns,
        )
        self.users = LoadRunner(
            self.load,
            think_time_s=config.think_time,
            times_ns=work.times_ns,
            end_reason="requests" if config.requests is not None else "end_of_trace",
            limit=BoundedSemaphore(config.max_in_flight) if config.max_in_flight else None,
        )

    def _known_requests(self, work: workload.Workload) -> int:
        if work.times_ns is not None:
            return len(work.times_ns)
        return self.config.requests or max(PREPARE_CLOSED, 4 * self.config.concurrency)

    def _rules(self) -> StopRules:
        config = self.config
        is_open = config.is_open_loop
        return StopRules(
            config.warmup_s,
            config.duration_s,
            requests=None if is_open else config.requests,
            slots=None if is_open else config.concurrency,
            max_errors=config.max_errors,
            max_error_share=config.max_error_share,
        )

    def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            gevent.signal_handler(number, self._interrupt)
        gevent.signal_handler(UNHEALTHY_SIGNAL, self.load.stop, "server_unhealthy")
        LoadUser.runner = self.users
        self.runs_before_others = self.config.priority == "auto" and run_before_others()
        runner = self._start_locust()
        while not self.load.start_ns:
            gevent.sleep(0)
        _say(type="started", start_ns=self.load.start_ns, wall_s=time.time(), at_ns=time.perf_counter_ns())
        helpers = [gevent.spawn(self._watch_loop), gevent.spawn(self._report_every_second)]
        while not self.load.is_over:
            gevent.sleep(POLL_S)
            self.load.tick()
        drained_s = self._drain()
        gevent.killall(helpers, block=True)
        runner.quit()
        self._finish(drained_s)

    def _start_locust(self) -> "locust.runners.Runner":
        environment = locust.env.Environment(
            user_classes=[OpenLoopUser if self.config.is_open_loop else ClosedLoopUser]
        )
        if not self.config.is_open_loop:
            shape = UsersOverTime()
            shape.shape = ConstantShape(self.config.concurrency)
            environment.shape_class = shape
        runner = environment.create_local_runner()
        if self.config.is_open_loop:
            runner.start(1, spawn_rate=1)
        else:
            runner.start_shape()
        return runner

    def _interrupt(self) -> None:
        self.users.is_interrupted = True
        self.load.stop("interrupted")

    def _drain(self) -> float:
        """Wait for what is in flight, up to the drain limit, and cut the rest. Returns the seconds it took."""
        started_ns = self.load.clock_ns()
        limit_ns = started_ns + round(self.config.drain_s * NS_PER_S)
        while (self.users.at_work or self.users.waiting) and self.load.clock_ns() < limit_ns:
            gevent.sleep(POLL_S)
        self.users.cut(Status.CANCELLED if self.users.is_interrupted else Status.UNFINISHED)
        return (self.load.clock_ns() - started_ns) / NS_PER_S

    def _watch_loop(self) -> None:
        while True:
            asked_ns = time.perf_counter_ns()
            gevent.sleep(TIMER_S)
            late_s = (time.perf_counter_ns() - asked_ns) / NS_PER_S - TIMER_S
            self.monitor.note_timer(late_s)
            if late_s > MAX_LOOP_GAP_S:
                self.load.stop("client_limit")

    def _report_every_second(self) -> None:
        while True:
            gevent.sleep(1.0)
            self._report()

    def _report(self) -> None:
        load, live = self.load, self.load.recorder.live
        t_s = (load.clock_ns() - load.start_ns) / NS_PER_S
        row = {
            "t_s": t_s,
            "worker": 0,
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
        del live.second_ttft_s[:]
        try:
            self.series.write(row)
        except OSError as error:
            load.client_errors.append(f"the time series cannot be written: {error.strerror}")
            load.stop("no_space")
        progress = live_row(live, load.in_flight) | {"tokens_out": row["tokens_out"], "waiting": self.users.waiting}
        _say(type="progress", t_s=t_s, phase=str(load.phase), statuses=dict(live.statuses), **progress)

    def _finish(self, drained_s: float) -> None:
        self._report()
        self.records.close()
        self.series.close()
        load = self.load

        def since_start(at_ns: int | None) -> float | None:
            return None if at_ns is None else (at_ns - load.start_ns) / NS_PER_S

        end = {
            "stop_reason": load.stop_reason,
            "warmup_ended_s": since_start(load.measure_ns),
            "window_end_s": since_start(load.window_end_ns),
            "drain_s": drained_s,
            "clipped": load.clipped.to_json(),
            "client_errors": load.client_errors[:20],
        }
        worker = {
            "worker": 0,
            "is_lost": False,
            "runs_before_others": self.runs_before_others,
            **self.monitor.summary(),
        }
        write_client(self.directory, {**end, "write_errors": load.write_errors, "workers": [worker]})
        _say(type="done", **end)


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message, allow_nan=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
