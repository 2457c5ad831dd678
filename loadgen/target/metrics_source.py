"""The source of a run's server metrics: the metrics route of each URL, or other addresses."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from loadgen.errors import TargetError
from loadgen.target.access import NO_ACCESS, Access
from loadgen.target.control import ControlClient

ROUTE = "/metrics"
TIMEOUT_S = 5.0


@dataclass(slots=True)
class MetricsSource:
    """The metrics of one server, in the text format of Prometheus. `is_present`: its first reply was status 200."""

    name: str
    control: ControlClient
    route: str = ROUTE
    is_present: bool | None = None

    def text(self) -> str | None:
        """The metrics now; None if there is no answer."""
        try:
            status, body = self.control.get(self.route, timeout_s=TIMEOUT_S)
        except TargetError:
            status, body = 0, b""
        if self.is_present is None:
            self.is_present = status == 200
        return body.decode(errors="replace") if status == 200 else None


@contextlib.contextmanager
def open_metrics_sources(
    urls: Sequence[str], access: Access = NO_ACCESS, metrics_urls: Sequence[str] = ()
) -> Iterator[list[MetricsSource]]:
    """The sources of a run, closed after use."""
    sources = metrics_sources(urls, access, metrics_urls)
    try:
        yield sources
    finally:
        for source in sources:
            source.control.close()


def metrics_sources(
    urls: Sequence[str], access: Access = NO_ACCESS, metrics_urls: Sequence[str] = ()
) -> list[MetricsSource]:
    """A source for each metrics URL; without any, for each URL of the server.

    A metrics URL without a path has the usual route. The headers of requests are sent to the hosts of the URLs only:
    they may hold a key.
    """
    if not metrics_urls:
        return [MetricsSource(url, ControlClient(url, access)) for url in urls]
    hosts = {urlsplit(url).hostname for url in urls}
    sources = []
    for url in metrics_urls:
        parts = urlsplit(url)
        own = access if parts.hostname in hosts else Access(tls=access.tls)
        sources.append(MetricsSource(url, ControlClient(f"{parts.scheme}://{parts.netloc}", own), parts.path or ROUTE))
    return sources
