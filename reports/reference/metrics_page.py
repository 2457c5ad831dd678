"""The page docs/metrics.md, from the records of the metrics."""

from collections.abc import Iterator, Sequence

from reports.metrics.requests.per_request import PER_REQUEST, Direction, RequestMetric
from reports.metrics.requests.pooled_metrics import POOLED, PooledMetric
from reports.metrics.run_metrics import PER_RUN, RunMetric
from reports.metrics.server.server_metrics import SERVER_METRICS
from reports.text import markdown_table

INTRODUCTION = """# Metrics

A metric has one name in objectives (`--slo`), limits (`[[objective.limit]]`, `--require`), `--gate`, tables and
`summary.json`. Times in files are in seconds (`ttft_s`). In objectives, limits and tables, times are in milliseconds
and have a statistic: `ttft_p95_ms`, `tpot_mean_ms`, `e2e_p99.9_ms`. Statistics are `mean` and percentiles (`p1` to
`p99.9`), in tables also `min` and `max`. Rates and fractions have no statistic: `output_tokens_per_s`, `error_rate`. In
an open loop, `ttft_…_ms` and `e2e_…_ms` count from the scheduled time of the request (`ttft_co_s`, `e2e_co_s`).

In formulas, `t_…` are the times of a request (`requests.parquet`, see [files.md](files.md)), `n_out` is its number of
output tokens and `k1` the number of tokens of its first event. ↓: lower is better, ↑: higher is better. `make docs`
generates this page.
"""
SECTIONS: tuple[tuple[str, Sequence[RequestMetric | PooledMetric | RunMetric]], ...] = (
    ("One value for each request\n\nThese metrics include the requests that started in the window.", PER_REQUEST),
    (
        "One value for each event or token\n\nThe values are pooled over the requests that started in the window.",
        POOLED,
    ),
    ("One value for the run", PER_RUN),
)
BETTER = {Direction.LOWER: "↓", Direction.HIGHER: "↑", Direction.NONE: ""}


def render_page() -> Iterator[str]:
    """The lines of the page: the client's metrics, then the server's."""
    yield INTRODUCTION
    for title, metrics in SECTIONS:
        yield f"## {title}\n"
        yield from markdown_table(
            ("name", "metric", "unit", "better", "formula"),
            [(f"`{each.name}`", each.title, each.unit, BETTER[each.direction], each.formula) for each in metrics],
        )
    yield "## The server's own metrics\n"
    yield "From the server's `/metrics`, over the window. If the server has several of the series, the first is used.\n"
    yield from markdown_table(
        ("name", "metric", "unit", "kind", "series"),
        [
            (f"`{each.name}`", each.title, each.unit, each.kind, ", ".join(f"`{series}`" for series in each.series))
            for each in SERVER_METRICS
        ],
    )
