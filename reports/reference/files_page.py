"""The page docs/files.md, from the schemas of a run's files."""

from collections.abc import Iterator, Mapping

import pyarrow as pa

from reports.metrics.finish_run import table_schema
from reports.pages.sections.request_tables import STATUS_TEXT
from reports.reference.file_keys import (
    MANIFEST_KEYS,
    REQUEST_COLUMNS,
    SERVER_METRICS_COLUMNS,
    SUMMARY_KEYS,
    TIMESERIES_COLUMNS,
)
from reports.run_store import REQUESTS, SCHEMA_VERSION, SERVER_METRICS, TIMESERIES
from reports.text import markdown_table

INTRODUCTION = f"""# Files of a run

A run directory (`runs/<id>`) contains these files. In every file, `schema_version` is the version of the format,
{SCHEMA_VERSION}. Times in seconds or nanoseconds count from the run's start on the generator's monotonic clock; the
time of an event that did not occur is null. [notebook.md](notebook.md) reads the files as frames. `make docs` generates
this page.

| file | content |
|---|---|
| `manifest.json` | the server, the load and the machine |
| `summary.json` | every metric with its interval, and the verdict |
| `requests.parquet` | a row for each request |
| `timeseries.parquet` | a row for each second and worker |
| `server_metrics.parquet` | a row for each sample of the server's metrics and of accelerators |
| `schedule.parquet` | the scheduled start of each request of an open loop: `t_intended_ns`, `prompt_id` |
| `client.json` | the load generator's measurements of itself |
| `report.html`, `report.md` | the report |
| `index.html` | in a folder of results: their index, by `tgi-bench report FOLDER` |
| `requests.csv`, `events.parquet`, `otel.json` | written by `--export csv`, `events`, `otel` |
| `server.log`, `worker.log` | output of a launched server, and of the load generator if it wrote any |
"""
TABLES: tuple[tuple[str, Mapping[str, str]], ...] = (
    (REQUESTS, REQUEST_COLUMNS),
    (TIMESERIES, TIMESERIES_COLUMNS),
    (SERVER_METRICS, SERVER_METRICS_COLUMNS),
)


def render_page() -> Iterator[str]:
    """The lines of the page: the columns of each table, then the keys of the JSON files."""
    yield INTRODUCTION
    for table, columns in TABLES:
        yield f"## `{table}.parquet`\n"
        yield from markdown_table(
            ("column", "type", "meaning"),
            [(f"`{column.name}`", _type(column.type), columns[column.name]) for column in table_schema(table)],
        )
        if table == REQUESTS:
            yield "Values of `status`:\n"
            yield from markdown_table(
                ("status", "meaning"), [(f"`{name}`", text) for name, text in STATUS_TEXT.items()]
            )
    yield "## `summary.json`\n"
    yield "Words in capitals are placeholders for a metric of [metrics.md](metrics.md) or a percentile such as `p95`.\n"
    yield from markdown_table(("key", "meaning"), [(f"`{key}`", text) for key, text in SUMMARY_KEYS.items()])
    yield "## `manifest.json`\n"
    yield from markdown_table(("key", "meaning"), [(f"`{key}`", text) for key, text in MANIFEST_KEYS.items()])


def _type(kind: pa.DataType) -> str:
    return f"list of {kind.value_type}" if pa.types.is_list(kind) else str(kind)
