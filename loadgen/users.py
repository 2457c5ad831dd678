"""locust's users: a closed loop of users who wait for their answers, and an open loop that starts requests on time.

Imported by the worker only: importing locust makes this process's sockets cooperative.
"""

import time
from dataclasses import dataclass, field
from typing import ClassVar

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from locust import User, task
from locust.exception import StopUser

from loadgen.datasets.prompt import Prompt
from loadgen.deal import Seat
from loadgen.exchange import Cut
from loadgen.load import NS_PER_S, Load
from loadgen.recorder import Times
from loadgen.shapes import Shape
from loadgen.think_time import ThinkTime
from loadgen.timers import Alarm
from reports.records import Status

# A user whose connection was refused waits, or a dead server would be asked thousands of times a second.
PAUSE_AFTER_REFUSAL_S = 0.1
MAX_WAITING = 100_000
NO_PAUSE = ThinkTime("fixed", 0.0, 0.0)
ALONE = Seat()


@dataclass(slots=True)
class LoadRunner:
    """What both kinds of users need: the load, the schedule of an open one, and the greenlets at work.

    `is_gated` where a master says when the load begins: users who are there earlier wait for it. `shape` says how many
    users of a closed loop send over time, those of all workers together; None is all of them, always.
    """

    load: Load
    think_time: ThinkTime = NO_PAUSE
    shape: Shape | None = None
    seat: Seat = ALONE
    times_ns: list[int] | None = None
    end_reason: str = "requests"
    limit: BoundedSemaphore | None = None
    is_gated: bool = False
    is_interrupted: bool = False
    waiting: int = 0
    joined: int = 0
    begun: Event = field(default_factory=Event)
    at_work: set[gevent.Greenlet] = field(default_factory=set)

    def begin(self, at_ns: int | None = None) -> None:
        """The load begins now, or at a time that was agreed on; only the first call counts."""
        self.load.start(at_ns)
        self.begun.set()

    def wait_for_begin(self) -> None:
        """Return when the load begins, which the first user makes it do where nobody else does."""
        if not self.is_gated:
            self.begin()
        self.begun.wait()
        while (left_ns := self.load.start_ns - self.load.clock_ns()) > 0 and not self.load.is_over:
            gevent.sleep(left_ns / NS_PER_S)

    def join(self) -> int:
        """The number of one more user, among those of all workers."""
        self.joined += 1
        return (self.joined - 1) * self.seat.count + self.seat.index

    def wait_for_turn(self, number: int) -> bool:
        """Return once a user may send: whether it had to wait until then. Users who never may wait for the end."""
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
        """One request from this greenlet; `Cut` leaves through here."""
        greenlet = gevent.getcurrent()
        self.at_work.add(greenlet)
        try:
            return self.load.send(prompt, body, times, slot)
        finally:
            self.at_work.discard(greenlet)

    def cut(self, status: Status) -> None:
        """End everything that is still at work."""
        gevent.killall(list(self.at_work), Cut(status), block=True, timeout=5)


class LoadUser(User):  # type: ignore[misc]
    """Base of both; the worker sets `runner` before any user is made."""

    abstract = True
    runner: ClassVar[LoadRunner]

    def report(self, prompt: Prompt, status: Status, started_ns: int) -> None:
        """Tell locust's own statistics, which are for display."""
        self.environment.events.request.fire(
            request_type="POST",
            name=self.runner.load.client.dialect.path,
            response_time=(time.perf_counter_ns() - started_ns) / 1e6,
            response_length=0,
            exception=None if status == Status.OK else RuntimeError(status),
            context={"prompt_id": prompt.prompt_id},
        )


class ClosedLoopUser(LoadUser):
    """Sends, waits for the end of the answer, thinks, sends again."""

    @task  # type: ignore[untyped-decorator]
    def converse(self) -> None:
        runner = self.runner
        load = runner.load
        runner.wait_for_begin()
        slot, number = id(self), runner.join()
        runner.wait_for_turn(number)
        free_ns = load.clock_ns()
        while (made := load.next_request(slot)) is not None:
            prompt, body = made
            times = Times(free_ns, load.clock_ns())
            try:
                status = runner.send(prompt, body, times, slot)
            except Cut:
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
    """The scheduler: starts every request at its intended time, whatever is in flight."""

    @task  # type: ignore[untyped-decorator]
    def follow_schedule(self) -> None:
        runner = self.runner
        load = runner.load
        runner.wait_for_begin()
        alarm = Alarm()
        for due_ns in runner.times_ns or ():
            due_ns += load.start_ns
            while not load.is_over and (now_ns := load.clock_ns()) < due_ns:
                alarm.sleep_until(min(due_ns, now_ns + NS_PER_S // 4))
            if load.is_over:
                raise StopUser
            session = load.next_session()
            if session is None:
                raise StopUser
            runner.waiting += 1
            gevent.spawn(self._converse, session, due_ns)
            if runner.waiting > MAX_WAITING:
                load.stop("overloaded_client")
        if load.rules.duration_s is None:
            load.stop(runner.end_reason)
        raise StopUser

    def _sleep_until(self, due_ns: int) -> None:
        load = self.runner.load
        while not load.is_over and (left_ns := due_ns - load.clock_ns()) > 0:
            gevent.sleep(min(left_ns / NS_PER_S, 0.25))

    def _converse(self, session: list[tuple[Prompt, bytes]], due_ns: int) -> None:
        """The turns of a session one after another, each when the answer before it was read; most have one turn."""
        load = self.runner.load
        for prompt, body in session:
            if prompt.turn and load.is_over:
                return
            self.runner.waiting += prompt.turn > 0
            status = self._send(prompt, body, due_ns)
            if status != Status.OK or not prompt.turns_left:
                return
            due_ns = load.clock_ns() + round(self.runner.think_time.after(prompt.prompt_id) * NS_PER_S)
            self._sleep_until(due_ns)

    def _send(self, prompt: Prompt, body: bytes, due_ns: int) -> Status | None:
        """How the request ended; None when it was cut."""
        runner = self.runner
        started_ns = runner.load.clock_ns()
        greenlet = gevent.getcurrent()
        runner.at_work.add(greenlet)
        try:
            if runner.limit is None:
                runner.waiting -= 1
                return self._send_now(prompt, body, Times(due_ns, started_ns))
            limit_wait_s = self._wait_at_limit(prompt, due_ns, started_ns, runner.limit)
            try:
                return self._send_now(prompt, body, Times(due_ns, runner.load.clock_ns(), limit_wait_s))
            finally:
                runner.limit.release()
        except Cut:
            return None
        finally:
            runner.at_work.discard(greenlet)

    def _wait_at_limit(self, prompt: Prompt, due_ns: int, started_ns: int, limit: BoundedSemaphore) -> float:
        """Seconds spent waiting for a place; a cut or an interrupt meanwhile is recorded."""
        load = self.runner.load
        try:
            limit.acquire()
            if self.runner.is_interrupted:
                limit.release()
                raise Cut(Status.CANCELLED)
        except Cut as cut:
            load.skip(prompt, Times(due_ns, started_ns), cut)
            raise
        finally:
            self.runner.waiting -= 1
        return (load.clock_ns() - started_ns) / NS_PER_S

    def _send_now(self, prompt: Prompt, body: bytes, times: Times) -> Status:
        status = self.runner.send(prompt, body, times)
        self.report(prompt, status, times.dispatch_ns)
        return status
