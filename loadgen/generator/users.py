"""locust's users: a closed loop, which waits for answers, and an open loop, which starts requests on schedule.

Imported by the worker only: importing locust makes this process's sockets cooperative.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from locust import User, task
from locust.exception import StopUser

from loadgen.generator.load_state import LoadState
from loadgen.generator.load_window import NS_PER_S
from loadgen.generator.partition import Partition
from loadgen.generator.recorder import Times
from loadgen.http.call import CallCancelled
from loadgen.http.timers import Alarm
from loadgen.workloads.prompts.prompt import Prompt
from loadgen.workloads.shapes import Shape
from loadgen.workloads.think_time import ThinkTime
from reports.run_schema import NOT_FAILED, Status

# Without a pause, users would retry a dead server thousands of times a second.
PAUSE_AFTER_REFUSAL_S = 0.1
MAX_WAITING = 100_000
NO_THINK_TIME = ThinkTime("fixed", 0.0, 0.0)
WHOLE_LOAD = Partition()


@dataclass(slots=True)
class LoadRunner:
    """Shared by both kinds of users: the load, the schedule of an open loop, and the greenlets with a request.

    With `is_gated` the master starts the load, and users wait for it. `shape` is the number of sending users over time,
    of all workers together; None: all users, always. `times_ns` are the arrivals of warm-up, window and drain.
    """

    load: LoadState
    think_time: ThinkTime = NO_THINK_TIME
    shape: Shape | None = None
    partition: Partition = WHOLE_LOAD
    times_ns: Iterable[int] = ()
    limit: BoundedSemaphore | None = None
    is_gated: bool = False
    waiting: int = 0
    num_users: int = 0
    begun: Event = field(default_factory=Event)
    sending: set[gevent.Greenlet] = field(default_factory=set)

    def begin(self, at_ns: int | None = None) -> None:
        """Begin the load now or at a given time; only the first call counts."""
        self.load.start(at_ns)
        self.begun.set()

    def wait_for_begin(self) -> None:
        """Return when the load begins. Without a master the first user begins it."""
        if not self.is_gated:
            self.begin()
        self.begun.wait()
        while (left_ns := self.load.start_ns - self.load.clock_ns()) > 0 and not self.load.is_over:
            gevent.sleep(left_ns / NS_PER_S)

    def add_user(self) -> int:
        """Add a user; returns its number among the users of all workers."""
        self.num_users += 1
        return (self.num_users - 1) * self.partition.count + self.partition.index

    def wait_for_turn(self, number: int) -> bool:
        """Wait until a user may send, or the load is over. Returns whether it waited."""
        load, has_waited = self.load, False
        while self.shape is not None and not load.is_over:
            now_s = (load.clock_ns() - load.start_ns) / NS_PER_S
            entry_s = self.shape.entry_s(number, now_s)
            if entry_s is not None and entry_s <= now_s:
                break
            has_waited = True
            gevent.sleep(0.25 if entry_s is None else min(entry_s - now_s, 0.25))
        return has_waited

    def send(self, prompt: Prompt, body: bytes, times: Times, slot: int | None = None) -> Status:
        """Send one request from this greenlet. Raises CallCancelled."""
        greenlet = gevent.getcurrent()
        self.sending.add(greenlet)
        try:
            return self.load.send(prompt, body, times, slot)
        finally:
            self.sending.discard(greenlet)

    def cancel(self, status: Status) -> None:
        """Cancel the requests in flight."""
        gevent.killall(list(self.sending), CallCancelled(status), block=True, timeout=5)


class LoadUser(User):  # type: ignore[misc]
    """Base of both; the worker sets `runner` before locust creates users."""

    abstract = True
    runner: ClassVar[LoadRunner]

    def report(self, prompt: Prompt, status: Status, started_ns: int) -> None:
        """Report to locust's statistics, which are for display."""
        self.environment.events.request.fire(
            request_type="POST",
            name=self.runner.load.client.dialect.path,
            response_time=(time.perf_counter_ns() - started_ns) / 1e6,
            response_length=0,
            exception=None if status in NOT_FAILED else RuntimeError(status),
            context={"prompt_id": prompt.prompt_id},
        )


class ClosedLoopUser(LoadUser):
    """Sends a request, waits for the end of the answer, pauses, repeats."""

    @task  # type: ignore[untyped-decorator]
    def send_requests(self) -> None:
        runner = self.runner
        load = runner.load
        runner.wait_for_begin()
        slot, number = id(self), runner.add_user()
        runner.wait_for_turn(number)
        free_ns = load.clock_ns()
        while (request := load.next_request(slot)) is not None:
            prompt, body = request
            times = Times(free_ns, load.clock_ns())
            try:
                status = runner.send(prompt, body, times, slot)
            except CallCancelled:
                break
            self.report(prompt, status, times.dispatch_ns)
            is_refused = status == Status.CONNECT_ERROR
            pause_s = runner.think_time.after(prompt.prompt_id) or (PAUSE_AFTER_REFUSAL_S if is_refused else 0.0)
            free_ns = (load.last_end_ns or load.clock_ns()) + round(pause_s * NS_PER_S)
            if pause_s:
                gevent.sleep(pause_s)
            if runner.wait_for_turn(number):
                free_ns = load.clock_ns()
        raise StopUser


class OpenLoopUser(LoadUser):
    """The scheduler: starts every request at its intended time, independent of those in flight."""

    @task  # type: ignore[untyped-decorator]
    def follow_schedule(self) -> None:
        runner = self.runner
        load, window = runner.load, runner.load.window
        runner.wait_for_begin()
        alarm = Alarm()
        for since_start_ns in runner.times_ns:
            due_ns = window.next_due_ns = load.start_ns + since_start_ns
            while not load.is_over and (now_ns := load.clock_ns()) < due_ns:
                alarm.sleep_until(min(due_ns, now_ns + NS_PER_S // 4))
            session = load.next_session()
            if session is None:
                raise StopUser
            runner.waiting += 1
            window.expect(id(session[0][0]), due_ns)
            gevent.spawn(self._send_session, session, due_ns)
            if runner.waiting > MAX_WAITING:
                load.stop("overloaded_client")
        window.next_due_ns = None
        raise StopUser

    def _sleep_until(self, due_ns: int) -> None:
        load = self.runner.load
        while not load.is_over and (left_ns := due_ns - load.clock_ns()) > 0:
            gevent.sleep(min(left_ns / NS_PER_S, 0.25))

    def _send_session(self, session: list[tuple[Prompt, bytes]], due_ns: int) -> None:
        """Send the turns of a session, each after the answer before it. Most sessions have one turn."""
        load, runner = self.runner.load, self.runner
        for prompt, body in session:
            if prompt.turn:
                load.window.expect(id(prompt), due_ns)
                self._sleep_until(due_ns)
                runner.waiting += 1
            if load.is_over:
                runner.waiting -= 1
                load.window.forget(id(prompt))
                return
            status = self._send(prompt, body, due_ns)
            if status != Status.OK or not prompt.turns_left:
                return
            due_ns = load.clock_ns() + round(runner.think_time.after(prompt.prompt_id) * NS_PER_S)

    def _send(self, prompt: Prompt, body: bytes, due_ns: int) -> Status | None:
        """Send one request. Returns its status; None if it was cancelled."""
        runner = self.runner
        started_ns = runner.load.clock_ns()
        greenlet = gevent.getcurrent()
        runner.sending.add(greenlet)
        try:
            if runner.limit is None:
                runner.waiting -= 1
                return self._send_now(prompt, body, Times(due_ns, started_ns))
            limit_wait_s = self._wait_at_limit(prompt, due_ns, started_ns, runner.limit)
            try:
                return self._send_now(prompt, body, Times(due_ns, runner.load.clock_ns(), limit_wait_s))
            finally:
                runner.limit.release()
        except CallCancelled:
            return None
        finally:
            runner.sending.discard(greenlet)

    def _wait_at_limit(self, prompt: Prompt, due_ns: int, started_ns: int, limit: BoundedSemaphore) -> float:
        """Seconds spent waiting at the in-flight limit; a cancelled wait is recorded."""
        load = self.runner.load
        try:
            limit.acquire()
            if load.is_over:
                limit.release()
                raise CallCancelled(Status.CANCELLED)
        except CallCancelled as cancelled:
            load.skip(prompt, Times(due_ns, started_ns), cancelled)
            raise
        finally:
            self.runner.waiting -= 1
        return (load.clock_ns() - started_ns) / NS_PER_S

    def _send_now(self, prompt: Prompt, body: bytes, times: Times) -> Status:
        status = self.runner.send(prompt, body, times)
        self.report(prompt, status, times.dispatch_ns)
        return status
