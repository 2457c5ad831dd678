"""The page docs/server-metrics.md, from the router's series."""

from collections.abc import Iterator

from reference_server.router.telemetry.metrics import Metrics

INTRODUCTION = """# Metrics of the server

`GET /metrics` of the router has these series in Prometheus' text format. A series with a name of TGI has the meaning
that it has in TGI. A series appears with its first sample. Names have no suffix `_total`.
[operations.md](operations.md) describes the series to watch.

Histograms of durations have 35 buckets from 0.15 ms to 146 s; each bound is 1.5 times the one before. `make docs`
generates this page.
"""


def render_page() -> Iterator[str]:
    """The lines of the page."""
    yield INTRODUCTION
    yield "| series | kind | label | meaning |"
    yield "|---|---|---|---|"
    for each in Metrics(1024, 2048).series:
        label = f"`{each.label}`" if each.label else ""
        yield f"| `{each.name}` | {each.kind} | {label} | {each.help} |"
