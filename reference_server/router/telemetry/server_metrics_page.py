"""The page docs/server-metrics.md, from the router's series."""

from collections.abc import Iterator

from reference_server.router.telemetry.metrics import Metrics

INTRODUCTION = """# Metrics of the server

`GET /metrics` of the router has these series in Prometheus' text format. Names that TGI has mean the same here. A
series appears with its first sample; a name has no `_total`. [operations.md](operations.md) describes the series to
watch.

Histograms of durations have 35 buckets from 0.15 ms to 146 s, each 1.5 times as wide as the one before. `make docs`
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
