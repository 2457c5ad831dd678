"""`python -m loadgen.generator.distributed.master`: coordinates the workers of one run, on locust's master runner.

Makes no load itself. Reads a `WorkerPlan` and a `Distribution` as JSON on stdin and writes the same messages on stdout
as a single worker. Starts its workers, or waits for workers that join; assigns partitions; measures clock offsets;
starts and stops all workers together. worker_group.py has the decisions. SIGINT or SIGTERM: stop sending, wait for the
requests in flight, finish.
"""

# First: it makes the sockets of everything imported after it cooperative.
from loadgen.generator.locust_import import locust

# isort: split
import gevent
import locust.dispatch
import locust.env
import locust.runners

# isort: split
import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gevent.queue import Empty, Queue

from loadgen.config.bench_config import BenchConfig
from loadgen.config.distribution import JOIN_KEY_VARIABLE, Address, Distribution
from loadgen.errors import MeasurementError
from loadgen.generator.distributed.clocks import ClockOffset, Ping, estimate
from loadgen.generator.distributed.encrypted_sockets import EncryptedServer
from loadgen.generator.distributed.locust_master import GroupRunner, PartitionDispatcher
from loadgen.generator.distributed.web_ui import WebPage
from loadgen.generator.distributed.worker_group import Member, Stage, WorkerGroup
from loadgen.generator.users import ClosedLoopUser, OpenLoopUser
from loadgen.generator.worker import POLL_S, print_message
from loadgen.generator.worker_messages import (
    END_SIGNAL,
    FROM_WORKER,
    STOP_REQUESTED,
    STOP_SIGNAL,
    TO_WORKER,
    Hello,
    JoinPlan,
    WorkerPlan,
    pack_files,
)
from loadgen.parent_death import end_with_parent
from reports.run_store import REQUESTS, TIMESERIES, append_whole, write_client

PINGS = 16
PONG_S = 5.0
# Time between the start message and the start: the message must reach every worker.
START_DELAY_S = 0.25
EXIT_S = 5.0


def main() -> int:
    message = json.load(sys.stdin)
    plan, distribution = WorkerPlan.from_json(message["plan"]), Distribution.from_json(message["distribution"])
    if not end_with_parent(plan.parent_pid, signal.SIGKILL):
        return 1
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("locust").setLevel(logging.ERROR)
    try:
        Master(plan, distribution).run()
    except MeasurementError as error:
        print_message(type="failed", text=str(error))
        return 1
    return 0


class Master:
    """One run of several workers."""

    def __init__(self, plan: WorkerPlan, distribution: Distribution) -> None:
        self._plan = plan
        self._distribution = distribution
        self._config = config = BenchConfig.model_validate(plan.config)
        self._directory = Path(plan.directory)
        self._hello = Hello.of_this_process()
        requests = None if config.is_open_loop else config.requests
        self._group = WorkerGroup(distribution.count, self._hello, config.max_errors, requests)
        self._url_is_loopback = Address.parse(
            "url", plan.url.split("//")[1].split("/")[0], distribution.bind
        ).is_loopback
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pongs: dict[str, Queue[Ping]] = {}
        self._pinged_ns: dict[tuple[str, int], int] = {}
        self._start_ns = 0
        self._measure_ns: int | None = None
        self._drain_limit_ns: int | None = None
        self._sent: set[str] = set()
        self._write_errors = 0
        self._environment = locust.env.Environment(
            user_classes=[OpenLoopUser if config.is_open_loop else ClosedLoopUser],
            host=plan.url,
            dispatcher_class=functools.partial(PartitionDispatcher, self._group),
        )
        self._runner = self._bind(distribution.bind)
        self._page = self._open_page(distribution.web)

    def run(self) -> None:
        """Raises MeasurementError if not all workers become ready."""
        for number in (signal.SIGINT, signal.SIGTERM):
            gevent.signal_handler(number, self._group.stop, "interrupted")
        gevent.signal_handler(STOP_SIGNAL, self._group.stop, STOP_REQUESTED)
        gevent.signal_handler(END_SIGNAL, lambda: self._group.end_window(STOP_REQUESTED, time.perf_counter_ns()))
        try:
            self._wait_for_workers()
            if not self._group.is_stopped:
                self._begin()
                self._watch()
                self._measure_clocks_again()
        finally:
            self._end_workers()
        self._finish()

    def _bind(self, address: Address) -> GroupRunner:
        # locust's runner makes its own socket, from this name.
        locust.runners.rpc.Server = functools.partial(EncryptedServer, key=self._distribution.key)
        try:
            runner = GroupRunner(self._environment, address.host, address.port)
        except SystemExit:  # raised by locust if the port is taken
            raise MeasurementError(
                f"the master's address {address} is in use; choose another --master-bind-port"
            ) from None
        except Exception as error:
            raise MeasurementError(f"the master cannot listen at {address}: {error}") from error
        self._environment.runner = runner
        runner.register_message(FROM_WORKER, self._receive)
        return runner

    def _open_page(self, address: Address | None) -> WebPage | None:
        if address is None:
            return None
        report = self._directory.absolute() / "report.html"
        page = WebPage(self._environment, address, lambda: self._group.stop("interrupted"), report)
        print_message(type="notice", text=f"locust's web UI is at {page.start()} during the load")
        return page

    def _wait_for_workers(self) -> None:
        """Wait until all workers have joined and prepared their requests."""
        if self._distribution.is_open:
            at = Address(self._distribution.bind.host, self._runner.server.port)
            key = f"{JOIN_KEY_VARIABLE}={self._distribution.key} " if self._distribution.is_key_drawn else ""
            print_message(
                type="notice", text=f"waiting for {self._group.count} workers: {key}tgi-bench run --join {at}"
            )
        else:
            for index in range(self._group.count):
                self._processes[index] = self._start_worker(index)
        deadline_s = time.monotonic() + self._config.ready_timeout
        while not self._is_ready() and not self._group.is_stopped:
            gevent.sleep(POLL_S)
            self._detect_losses()
            for member in self._group.members:
                if member.stage == Stage.LOST:
                    raise MeasurementError(
                        f"worker {member.index} on {member.hello.host} failed: {member.lost_because}"
                    )
            if time.monotonic() > deadline_s:
                joined = f"{len(self._group.members)} of {self._group.count} workers"
                raise MeasurementError(f"only {joined} joined within {self._config.ready_timeout:g} s")

    def _is_ready(self) -> bool:
        ready = {node.id for node in self._runner.clients.ready}
        return self._group.is_ready and all(member.client_id in ready for member in self._group.members)

    def _start_worker(self, index: int) -> "subprocess.Popen[bytes]":
        join = JoinPlan(
            self._distribution.bind.host,
            self._runner.server.port,
            os.getpid(),
            self._distribution.key,
            str(self._directory),
            index,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "loadgen.generator.distributed.group_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(join.to_json()).encode())
            process.stdin.close()
        return process

    def _begin(self) -> None:
        """Measure every clock, assign the users, and start all workers at one moment."""
        self._group.has_begun = True
        self._runner.is_closed = True
        members = {member.client_id for member in self._group.members}
        for client_id in set(self._runner.clients) - members:
            del self._runner.clients[client_id]
        for member in self._group.members:
            member.measured = self._measure_clock(member)
        users = self._group.count if self._config.is_open_loop else self._config.users
        self._runner.start(users, spawn_rate=users)
        self._start_ns = time.perf_counter_ns() + round(START_DELAY_S * 1e9)
        self._measure_ns = None if self._config.warmup_s else self._start_ns
        for member in self._group.members:
            self._send(member, type="start", start_ns=self._start_ns + member.offset_ns)
        print_message(type="started", start_ns=self._start_ns, wall_s=time.time(), at_ns=time.perf_counter_ns())

    def _measure_clock(self, member: Member) -> ClockOffset:
        pongs = self._pongs[member.client_id] = Queue()
        pings = []
        for number in range(PINGS):
            self._pinged_ns[member.client_id, number] = time.perf_counter_ns()
            self._send(member, type="ping", number=number)
            try:
                pings.append(pongs.get(timeout=PONG_S))
            except Empty:
                raise MeasurementError(f"worker {member.index} on {member.hello.host} does not answer pings") from None
        return estimate(pings)

    def _measure_clocks_again(self) -> None:
        """Measure the drift since the start; a worker that no longer answers keeps its first estimate."""
        for member in self._group.members:
            if member.stage == Stage.DONE:
                with contextlib.suppress(MeasurementError):
                    member.measured_later = self._measure_clock(member)

    def _watch(self) -> None:
        second = 0
        while not self._group.is_over:
            gevent.sleep(POLL_S)
            self._detect_losses()
            self._direct()
            elapsed_s = (time.perf_counter_ns() - self._start_ns) / 1e9
            if elapsed_s >= second + 1:
                second = int(elapsed_s)
                self._report(elapsed_s)
        self._report((time.perf_counter_ns() - self._start_ns) / 1e9)

    def _direct(self) -> None:
        """Send every worker the decisions for the run, once each."""
        group = self._group
        if group.is_stopped:
            self._send_once("stop", lambda _: {"reason": group.stop_reason or "stopped"})
        if group.is_warm:
            self._measure_ns = self._measure_ns or group.warm_ns
            self._send_once("measure", lambda member: {"at_ns": (self._measure_ns or 0) + member.offset_ns})
        if group.window_end is not None:
            reason, end_ns = group.window_end
            self._send_once("end_window", lambda member: {"reason": reason, "at_ns": end_ns + member.offset_ns})
        if group.is_draining:
            now_ns = time.perf_counter_ns()
            self._drain_limit_ns = self._drain_limit_ns or now_ns + round(self._config.drain_s * 1e9)
            if not group.left or now_ns >= self._drain_limit_ns:
                self._send_once("drained", lambda _: {})

    def _send_once(self, kind: str, content: Callable[[Member], dict[str, Any]]) -> None:
        if kind not in self._sent:
            self._sent.add(kind)
            for member in self._group.active:
                self._send(member, type=kind, **content(member))

    def _report(self, elapsed_s: float) -> None:
        live = self._group.live(elapsed_s)
        print_message(type="progress", **live)
        if self._page is not None:
            self._page.update(live)

    def _detect_losses(self) -> None:
        """Detect own workers that ended, and workers whose heartbeats stopped."""
        for index, process in self._processes.items():
            code = process.poll()
            member = next((each for each in self._group.members if each.index == index), None)
            if code is None:
                continue
            if member is None:
                raise MeasurementError(f"worker {index} ended with exit code {code} before it joined")
            if member.is_active:
                self._lose(member, f"its process ended with exit code {code}")
        for member in self._group.active:
            node = self._runner.clients.get(member.client_id)
            # A worker that still prepares may be silent for a while: locust drops it after a minute.
            is_missing = self._group.has_begun and node is not None and node.state == locust.runners.STATE_MISSING
            if node is None or is_missing:
                self._lose(member, "its heartbeats stopped")

    def _lose(self, member: Member, because: str) -> None:
        self._group.lose(member, because)
        # Otherwise locust would assign its users to other workers after a minute.
        self._runner.clients.pop(member.client_id, None)
        if self._group.has_begun:
            print_message(type="notice", text=f"worker {member.index} on {member.hello.host} was lost: {because}")

    def _receive(self, environment: object, msg: Any) -> None:  # noqa: ARG002 - locust's signature
        received_ns = time.perf_counter_ns()
        message: dict[str, Any] = msg.data
        client_id = str(msg.node_id)
        member = self._group.member(client_id)
        if message["type"] == "hello":
            if member is None:
                self._answer_hello(client_id, Hello.from_json(message))
            return
        if member is None:
            return
        if member.stage == Stage.LOST:
            self._send(member, type="end")
            return
        match message["type"]:
            case "ready":
                self._note_ready(member, message)
            case "pong":
                sent_ns = self._pinged_ns.pop((client_id, message["number"]))
                self._pongs[client_id].put(Ping(sent_ns, message["at_ns"], received_ns))
            case "warm":
                member.warm_ns = message["at_ns"] - member.offset_ns
            case "progress":
                self._group.note_progress(member, message)
            case "rows":
                self._store(member, message["table"], message["lines"])
            case "starts":
                self._group.note_starts(member, message["starts_ns"], message["until_ns"], self._measure_ns)
            case "draining":
                member.left = message["left"]
            case "stopping":
                self._group.note_stopping(message["reason"])
            case "done":
                self._group.note_done(member, message["end"], message["health"])
            case "failed":
                self._group.lose(member, message["text"])

    def _answer_hello(self, client_id: str, hello: Hello | None) -> None:
        refusal = self._group.refusal(hello, self._url_is_loopback)
        if refusal is not None or hello is None:
            self._runner.send_message(TO_WORKER, {"type": "refused", "reason": refusal}, client_id)
            self._runner.clients.pop(client_id, None)
            print_message(type="notice", text=f"refused a worker{f' on {hello.host}' if hello else ''}: {refusal}")
            return
        member = self._group.admit(client_id, hello)
        self._send(
            member,
            type="plan",
            plan=self._plan.to_json(),
            index=member.index,
            count=self._group.count,
            files=pack_files(self._config) if self._distribution.is_open else {},
            is_watched=self._page is not None,
        )
        if self._distribution.is_open:
            print_message(type="notice", text=f"worker {member.index} joined from {hello.host}")

    def _note_ready(self, member: Member, message: dict[str, Any]) -> None:
        expected = (self._plan.workload_hash, self._plan.schedule_hash)
        if (message["workload_hash"], message["schedule_hash"]) != expected:
            self._group.lose(
                member, "it built a different workload from the same plan: its libraries differ from the master's"
            )
            return
        member.stage = Stage.READY

    def _store(self, member: Member, table: str, lines: list[str]) -> None:
        """Append rows that a remote worker sent, whole lines at once, so that a crash leaves a valid prefix."""
        if table not in (REQUESTS, TIMESERIES):
            return
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            with (self._directory / f"{table}-{member.index}.jsonl").open("ab", buffering=0) as file:
                append_whole(file, data)
        except OSError:
            self._write_errors += 1
            self._group.stop("no_space")

    def _send(self, member: Member, **message: Any) -> None:
        self._runner.send_message(TO_WORKER, message, member.client_id)

    def _send_all(self, **message: Any) -> None:
        for member in self._group.members:
            self._send(member, **message)

    def _end_workers(self) -> None:
        """End every worker process before this one."""
        self._send_all(type="end")
        deadline_s = time.monotonic() + EXIT_S
        while time.monotonic() < deadline_s and any(process.poll() is None for process in self._processes.values()):
            gevent.sleep(POLL_S)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        if self._page is not None:
            self._page.stop()
        self._runner.quit()

    def _finish(self) -> None:
        end = self._group.end()
        workers = [member.describe(self._group.count) for member in self._group.members]
        write_client(self._directory, {**end, "write_errors": self._write_errors, "workers": workers})
        print_message(type="done", **end)


if __name__ == "__main__":
    sys.exit(main())
