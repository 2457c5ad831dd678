"""`python -m loadgen.master`: holds the workers of one run together, on locust's own master runner.

Makes no load itself. Reads a `WorkerPlan` and a `Distribution` as JSON on stdin and says on stdout what a worker alone
would say. Starts its workers, or waits for those that join; gives each its seat; places their clocks on its own; lets
them begin together; stops all of them when one has to stop. Decisions are in crew.py. SIGINT or SIGTERM: stop sending,
drain, finish.
"""

# locust first: it makes the sockets of everything imported after it cooperative.
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
from pathlib import Path
from typing import Any

from gevent.queue import Empty, Queue

from loadgen.clocks import ClockOffset, Ping, estimate
from loadgen.config import BenchConfig
from loadgen.crew import Crew, Member, Stage
from loadgen.distribution import Address, Distribution
from loadgen.errors import MeasurementError
from loadgen.health import ASKED_TO_STOP, UNHEALTHY_SIGNAL
from loadgen.load_files import pack
from loadgen.messages import SAID, TOLD, Hello
from loadgen.plan import JoinPlan, WorkerPlan
from loadgen.tether import tie_to_parent
from loadgen.users import ClosedLoopUser, OpenLoopUser
from loadgen.web_ui import WebPage
from loadgen.worker import POLL_S, say
from reports.results import REQUESTS, TIMESERIES, write_client

PINGS = 16
PONG_S = 5.0
# From the word that a load begins to its beginning: it has to reach every worker.
BEGIN_IN_S = 0.25
LEAVE_S = 5.0


def main() -> int:
    told = json.load(sys.stdin)
    plan, distribution = WorkerPlan.from_json(told["plan"]), Distribution.from_json(told["distribution"])
    if not tie_to_parent(plan.parent_pid, signal.SIGKILL):
        return 1
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("locust").setLevel(logging.ERROR)
    try:
        Master(plan, distribution).run()
    except MeasurementError as error:
        say(type="failed", text=str(error))
        return 1
    return 0


class CrewRunner(locust.runners.MasterRunner):  # type: ignore[misc]
    """locust's master, but once `is_closed` no newcomer is dealt users: every share is fixed before the load begins."""

    is_closed = False

    def handle_message(self, client_id: str, msg: Any) -> None:
        if self.is_closed and msg.type == "client_ready" and client_id not in self.clients:
            # Answered, so that it says hello and is refused by name.
            self.send_message("ack", client_id=client_id, data={"index": -1})
            return
        super().handle_message(client_id, msg)


class BySeat(locust.dispatch.UsersDispatcher):  # type: ignore[misc]
    """locust's dispatcher, dealing users in the order of the seats, so that each has its `Seat.share_of` them."""

    _worker_nodes: list[Any]

    def __init__(self, crew: Crew, worker_nodes: list[Any], user_classes: list[Any]) -> None:
        self._index_of = {member.client_id: member.index for member in crew.members}
        super().__init__(worker_nodes, user_classes)

    def _sort_workers(self) -> None:
        self._worker_nodes = sorted(self._worker_nodes, key=lambda node: self._index_of.get(node.id, 0))


class Master:
    """One run of several workers."""

    def __init__(self, plan: WorkerPlan, distribution: Distribution) -> None:
        self._plan = plan
        self._distribution = distribution
        self._config = config = BenchConfig.model_validate(plan.config)
        self._directory = Path(plan.directory)
        self._me = Hello.of_this_process(distribution.key)
        self._crew = Crew(distribution.count, self._me, config.max_errors)
        self._url_is_loopback = Address.parse(
            "url", plan.url.split("//")[1].split("/")[0], distribution.bind
        ).is_loopback
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pongs: dict[str, Queue[Ping]] = {}
        self._pinged_ns: dict[tuple[str, int], int] = {}
        self._start_ns = 0
        self._told_stop = False
        self._told_measure = False
        self._write_errors = 0
        self._environment = locust.env.Environment(
            user_classes=[OpenLoopUser if config.is_open_loop else ClosedLoopUser],
            host=plan.url,
            dispatcher_class=functools.partial(BySeat, self._crew),
        )
        self._runner = self._bind(distribution.bind)
        self._page = self._open_page(distribution.web)

    def run(self) -> None:
        """Raises MeasurementError where the workers do not come together."""
        for number in (signal.SIGINT, signal.SIGTERM):
            gevent.signal_handler(number, self._crew.stop, "interrupted")
        gevent.signal_handler(UNHEALTHY_SIGNAL, self._crew.stop, ASKED_TO_STOP)
        try:
            self._gather()
            if self._crew.stop_reason is None:
                self._begin()
                self._follow()
                self._measure_clocks_again()
        finally:
            self._dismiss()
        self._finish()

    def _bind(self, address: Address) -> CrewRunner:
        try:
            runner = CrewRunner(self._environment, address.host, address.port)
        except SystemExit:  # what locust does when the port is taken
            raise MeasurementError(
                f"the master's address {address} is taken; give another --master-bind-port"
            ) from None
        except Exception as error:
            raise MeasurementError(f"the master cannot listen at {address}: {error}") from error
        self._environment.runner = runner
        runner.register_message(SAID, self._take)
        return runner

    def _open_page(self, address: Address | None) -> WebPage | None:
        if address is None:
            return None
        page = WebPage(self._environment, address, lambda: self._crew.stop("interrupted"))
        say(type="say", text=f"locust's web UI is at {page.start()} while the load lasts")
        return page

    def _gather(self) -> None:
        """Wait until every seat is taken and every worker has made its share of the load."""
        if self._distribution.is_open:
            at = Address(self._distribution.bind.host, self._runner.server.port)
            say(type="say", text=f"waiting for {self._crew.count} workers: tgi-bench run --join {at}")
        else:
            for index in range(self._crew.count):
                self._processes[index] = self._start_worker(index)
        deadline_s = time.monotonic() + self._config.ready_timeout
        while not self._is_gathered() and self._crew.stop_reason is None:
            gevent.sleep(POLL_S)
            self._notice_losses()
            for member in self._crew.members:
                if member.stage == Stage.LOST:
                    raise MeasurementError(
                        f"worker {member.index} on {member.hello.host} failed: {member.lost_because}"
                    )
            if time.monotonic() > deadline_s:
                came = f"{len(self._crew.members)} of {self._crew.count} workers"
                raise MeasurementError(f"{came} came within {self._config.ready_timeout:g} s")

    def _is_gathered(self) -> bool:
        ready = {node.id for node in self._runner.clients.ready}
        return self._crew.is_ready and all(member.client_id in ready for member in self._crew.members)

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
            [sys.executable, "-m", "loadgen.joined"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(join.to_json()).encode())
            process.stdin.close()
        return process

    def _begin(self) -> None:
        """Place every clock, hand out the users, and let all of them start at one moment."""
        self._crew.has_begun = True
        self._runner.is_closed = True
        members = {member.client_id for member in self._crew.members}
        for stranger in set(self._runner.clients) - members:
            del self._runner.clients[stranger]
        for member in self._crew.members:
            member.measured = self._measure_clock(member)
        users = self._crew.count if self._config.is_open_loop else self._config.users
        self._runner.start(users, spawn_rate=users)
        self._start_ns = time.perf_counter_ns() + round(BEGIN_IN_S * 1e9)
        for member in self._crew.members:
            self._tell(member, type="start", start_ns=self._start_ns + member.offset_ns)
        say(type="started", start_ns=self._start_ns, wall_s=time.time(), at_ns=time.perf_counter_ns())

    def _measure_clock(self, member: Member) -> ClockOffset:
        pongs = self._pongs[member.client_id] = Queue()
        pings = []
        for number in range(PINGS):
            self._pinged_ns[member.client_id, number] = time.perf_counter_ns()
            self._tell(member, type="ping", number=number)
            try:
                pings.append(pongs.get(timeout=PONG_S))
            except Empty:
                raise MeasurementError(f"worker {member.index} on {member.hello.host} does not answer") from None
        return estimate(pings)

    def _measure_clocks_again(self) -> None:
        """What the clocks drifted apart meanwhile; a worker that no longer answers keeps its first estimate."""
        for member in self._crew.members:
            if member.stage == Stage.DONE:
                with contextlib.suppress(MeasurementError):
                    member.measured_later = self._measure_clock(member)

    def _follow(self) -> None:
        second = 0
        while not self._crew.is_over:
            gevent.sleep(POLL_S)
            self._notice_losses()
            if self._crew.stop_reason is not None and not self._told_stop:
                self._told_stop = True
                self._tell_all(type="stop", reason=self._crew.stop_reason)
            if self._crew.is_warm and not self._told_measure:
                self._told_measure = True
                for member in self._crew.at_work:
                    self._tell(member, type="measure", at_ns=self._crew.warm_ns + member.offset_ns)
            elapsed_s = (time.perf_counter_ns() - self._start_ns) / 1e9
            if elapsed_s >= second + 1:
                second = int(elapsed_s)
                self._report(elapsed_s)
        self._report((time.perf_counter_ns() - self._start_ns) / 1e9)

    def _report(self, elapsed_s: float) -> None:
        live = self._crew.live(elapsed_s)
        say(type="progress", **live)
        if self._page is not None:
            self._page.update(live)

    def _notice_losses(self) -> None:
        """A worker of ours that ended, or any whose heartbeats stopped."""
        for index, process in self._processes.items():
            code = process.poll()
            member = next((each for each in self._crew.members if each.index == index), None)
            if code is None:
                continue
            if member is None:
                raise MeasurementError(f"worker {index} ended with exit code {code} before it said hello")
            if member.is_at_work:
                self._lose(member, f"its process ended with exit code {code}")
        for member in self._crew.at_work:
            node = self._runner.clients.get(member.client_id)
            # One that still makes its load may be silent for a while: locust drops it after a minute.
            is_missing = self._crew.has_begun and node is not None and node.state == locust.runners.STATE_MISSING
            if node is None or is_missing:
                self._lose(member, "its heartbeats stopped")

    def _lose(self, member: Member, because: str) -> None:
        self._crew.lose(member, because)
        # Or locust would deal its users to the others, after a minute.
        self._runner.clients.pop(member.client_id, None)
        if self._crew.has_begun:
            say(type="say", text=f"worker {member.index} on {member.hello.host} was lost: {because}")

    def _take(self, environment: object, msg: Any) -> None:  # noqa: ARG002 - locust's signature
        received_ns = time.perf_counter_ns()
        said: dict[str, Any] = msg.data
        client_id = str(msg.node_id)
        member = self._crew.member(client_id)
        if said["type"] == "hello":
            if member is None:
                self._answer_hello(client_id, Hello.from_json(said))
            return
        if member is None:
            return
        if member.stage == Stage.LOST:
            self._tell(member, type="end")
            return
        match said["type"]:
            case "ready":
                self._note_ready(member, said)
            case "pong":
                sent_ns = self._pinged_ns.pop((client_id, said["number"]))
                self._pongs[client_id].put(Ping(sent_ns, said["at_ns"], received_ns))
            case "warm":
                member.warm_ns = said["at_ns"] - member.offset_ns
            case "progress":
                self._crew.note_progress(member, said)
            case "rows":
                self._store(member, said["table"], said["lines"])
            case "stopping":
                self._crew.note_stopping(said["reason"])
            case "done":
                self._crew.note_done(member, said["end"], said["health"])
            case "failed":
                self._crew.lose(member, said["text"])

    def _answer_hello(self, client_id: str, hello: Hello | None) -> None:
        refusal = self._crew.refusal(hello, self._url_is_loopback)
        if refusal is not None or hello is None:
            self._runner.send_message(TOLD, {"type": "refused", "reason": refusal}, client_id)
            self._runner.clients.pop(client_id, None)
            say(type="say", text=f"refused a worker{f' on {hello.host}' if hello else ''}: {refusal}")
            return
        member = self._crew.admit(client_id, hello)
        self._tell(
            member,
            type="plan",
            plan=self._plan.to_json(),
            index=member.index,
            count=self._crew.count,
            files=pack(self._config) if self._distribution.is_open else {},
            is_watched=self._page is not None,
        )
        if self._distribution.is_open:
            say(type="say", text=f"worker {member.index} joined from {hello.host}")

    def _note_ready(self, member: Member, said: dict[str, Any]) -> None:
        wanted = (self._plan.workload_hash, self._plan.schedule_hash)
        if (said["workload_hash"], said["schedule_hash"]) != wanted:
            self._crew.lose(member, "it made another load of the same plan: its libraries differ from the master's")
            return
        member.stage = Stage.READY

    def _store(self, member: Member, table: str, lines: list[str]) -> None:
        """Append what a worker elsewhere sent; whole lines at once, so that a crash leaves a valid prefix."""
        if table not in (REQUESTS, TIMESERIES):
            return
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            with (self._directory / f"{table}-{member.index}.jsonl").open("ab", buffering=0) as file:
                while data:
                    data = data[file.write(data) or 0 :]
        except OSError:
            self._write_errors += 1
            self._crew.stop("no_space")

    def _tell(self, member: Member, **message: Any) -> None:
        self._runner.send_message(TOLD, message, member.client_id)

    def _tell_all(self, **message: Any) -> None:
        for member in self._crew.members:
            self._tell(member, **message)

    def _dismiss(self) -> None:
        """Nothing outlives this process."""
        self._tell_all(type="end")
        deadline_s = time.monotonic() + LEAVE_S
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
        end = self._crew.end()
        workers = [member.describe(self._crew.count) for member in self._crew.members]
        write_client(self._directory, {**end, "write_errors": self._write_errors, "workers": workers})
        say(type="done", **end)


if __name__ == "__main__":
    sys.exit(main())
