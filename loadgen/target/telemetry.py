"""Samples the servers' metrics and the GPUs during a run, as rows on the run's time axis."""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from loadgen.target.accelerator import Accelerators
from loadgen.target.metrics_source import MetricsSource
from reports.run_store import JsonlWriter

INTERVAL_S = 1.0
# Request counters, best first. TGI's `tgi_request_count` counts requests of the OpenAI routes twice.
REQUEST_COUNTS = (
    ("tgi_request_success", "tgi_request_failure"),
    ("tgi_request_count",),
    ("vllm:request_success_total", "vllm:request_success"),
    ("trtllm_request_success_total", "trtllm_request_success"),
    ("dynamo_frontend_requests_total", "dynamo_frontend_requests"),
)

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")


def parse_prometheus(text: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of every sample in the text format, without NaN and infinite values.

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
    """One round of samples, and its time (monotonic ns)."""

    at_ns: int
    samples: list[tuple[str, str, float]] = field(default_factory=list)

    def total(self, names: Sequence[str]) -> float | None:
        """The sum of the named series over their labels; None if there are none."""
        values = [value for name, _, value in self.samples if name in names]
        return sum(values) if values else None


class Telemetry:
    """Scrapes once a second in a thread, from before the load until after it, and samples the GPUs at the same times.

    Samples of several sources have a label `replica` with the source's URL, and one time for each round, so that they
    can be summed. A round is left out unless every source that has metrics answers. A source without metrics is scraped
    once.
    """

    def __init__(
        self, sources: Sequence[MetricsSource], writer: JsonlWriter, accelerators: Accelerators | None = None
    ) -> None:
        self._sources = tuple(sources)
        self._calls = ThreadPoolExecutor(max(1, len(self._sources)), "metrics")
        self._writer = writer
        self._accelerators = accelerators
        self._start_ns: int | None = None
        self._unwritten: list[Scrape] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._first: Scrape | None = None
        self._last: Scrape | None = None
        self.write_errors = 0

    @property
    def without_metrics(self) -> list[str]:
        """The sources that have no metrics."""
        return [source.name for source in self._sources if source.is_present is False]

    @property
    def num_present(self) -> int:
        """The number of sources that have metrics."""
        return len(self._sources) - len(self.without_metrics)

    def start(self) -> None:
        """Scrape once now, then in the background."""
        self._sample()
        if self.num_present or self._accelerators is not None:
            self._thread.start()

    def begin_run(self, start_ns: int) -> None:
        """Set time zero of the run; earlier scrapes get negative times."""
        self._start_ns = start_ns

    def finish(self) -> None:
        """Scrape once more and stop."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)
            self._sample()
        self._calls.shutdown()
        for source in self._sources:
            source.control.close()
        if self._accelerators is not None:
            self._accelerators.close()
        self._writer.close()

    @property
    def server_requests(self) -> int | None:
        """Requests that the server counted between the first and the last scrape; None without a counter."""
        if self._first is None or self._last is None:
            return None
        for names in REQUEST_COUNTS:
            counted = self._last.total(names)
            if counted is not None:
                # A counter at zero may be absent from the first scrape.
                return round(counted - (self._first.total(names) or 0.0))
        return None

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        if self.num_present:
            self._scrape()
        if self._accelerators is not None:
            self._unwritten.append(Scrape(time.perf_counter_ns(), self._accelerators.sample()))
        self._write()

    def _scrape(self) -> None:
        asked = [source for source in self._sources if source.is_present is not False]
        texts = list(self._calls.map(MetricsSource.text, asked))
        answered = [(source, text) for source, text in zip(asked, texts, strict=True) if text is not None]
        if not answered or len(answered) < self.num_present:
            return
        samples = [sample for source, text in answered for sample in self._labelled(source, text)]
        scrape = Scrape(time.perf_counter_ns(), samples)
        self._first = self._first or scrape
        self._last = scrape
        self._unwritten.append(scrape)

    def _labelled(self, source: MetricsSource, text: str) -> Iterator[tuple[str, str, float]]:
        """The samples of a source, which several sources name in a label."""
        if len(self._sources) == 1:
            return parse_prometheus(text)
        own = f'replica="{source.name}"'
        return ((name, f"{labels},{own}" if labels else own, value) for name, labels, value in parse_prometheus(text))

    def _write(self) -> None:
        if self._start_ns is None:
            return
        scrapes, self._unwritten = self._unwritten, []
        try:
            for scrape in scrapes:
                t_s = round((scrape.at_ns - self._start_ns) / 1e9, 6)
                for name, labels, value in scrape.samples:
                    self._writer.write({"t_s": t_s, "name": name, "labels": labels, "value": value})
        except OSError:
            self.write_errors += 1
