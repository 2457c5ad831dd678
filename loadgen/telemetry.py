"""The server's own metrics during a run: `/metrics` and GPU samples on a clock, as rows on the run's time axis."""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loadgen.accelerator import Accelerators
from loadgen.control import ControlClient
from loadgen.errors import TargetError
from reports.results import JsonlWriter

INTERVAL_S = 1.0
ROUTE = "/metrics"
# Where a server counts its requests, best first. TGI's own `tgi_request_count` counts those of the OpenAI routes twice.
REQUEST_COUNTS = (
    ("tgi_request_success", "tgi_request_failure"),
    ("tgi_request_count",),
    ("vllm:request_success_total",),
)

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")


def parse_prometheus(text: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of every sample of a text exposition; NaN and infinite values are left out.

    >>> list(parse_prometheus('# HELP x\\nx_total{a="b"} 3\\n'))
    [('x_total', 'a="b"', 3.0)]
    """
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is None or line.startswith("#"):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if value - value == 0:
            yield match[1], match[2] or "", value


@dataclass(slots=True)
class Scrape:
    """One answer of `/metrics`, and when it came (monotonic ns)."""

    at_ns: int
    samples: list[tuple[str, str, float]] = field(default_factory=list)

    def total(self, names: Sequence[str]) -> float | None:
        """The sum of some series over their labels; None where there is none of them."""
        values = [value for name, _, value in self.samples if name in names]
        return sum(values) if values else None


class Telemetry:
    """Scrapes once a second from a thread, from before the load to after it, and samples the GPUs at the same moments.

    A server without metrics is asked once and then left alone.
    """

    def __init__(self, control: ControlClient, writer: JsonlWriter, accelerators: Accelerators | None = None) -> None:
        self._control = control
        self._writer = writer
        self._accelerators = accelerators
        self._has_metrics = True
        self._start_ns: int | None = None
        self._held: list[Scrape] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._first: Scrape | None = None
        self._last: Scrape | None = None
        self.write_errors = 0

    def start(self) -> None:
        """Take the first scrape now, the others in the background."""
        self._sample()
        if self._has_metrics or self._accelerators is not None:
            self._thread.start()

    def begin_run(self, start_ns: int) -> None:
        """The run's zero; what was scraped before it gets negative times."""
        self._start_ns = start_ns

    def finish(self) -> None:
        """Take the last scrape and stop."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)
            self._sample()
        self._control.close()
        if self._accelerators is not None:
            self._accelerators.close()
        self._writer.close()

    @property
    def server_requests(self) -> int | None:
        """Requests the server counted between the first and the last scrape, where it says so."""
        if self._first is None or self._last is None:
            return None
        for names in REQUEST_COUNTS:
            counted = self._last.total(names)
            if counted is not None:
                # A counter that had not counted yet may be absent from the first scrape.
                return round(counted - (self._first.total(names) or 0.0))
        return None

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        if self._has_metrics:
            self._scrape()
        if self._accelerators is not None:
            self._held.append(Scrape(time.perf_counter_ns(), self._accelerators.sample()))
        self._write_held()

    def _scrape(self) -> None:
        try:
            status, body = self._control.get(ROUTE, timeout_s=5.0)
        except TargetError:
            return
        if status != 200:
            self._has_metrics = False
            return
        scrape = Scrape(time.perf_counter_ns(), list(parse_prometheus(body.decode(errors="replace"))))
        self._first = self._first or scrape
        self._last = scrape
        self._held.append(scrape)

    def _write_held(self) -> None:
        if self._start_ns is None:
            return
        held, self._held = self._held, []
        try:
            for scrape in held:
                t_s = round((scrape.at_ns - self._start_ns) / 1e9, 6)
                for name, labels, value in scrape.samples:
                    self._writer.write({"t_s": t_s, "name": name, "labels": labels, "value": value})
        except OSError:
            self.write_errors += 1
