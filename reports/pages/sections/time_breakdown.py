"""The section on the time breakdown: bars of an average request, tables, and the slowest requests over time."""

from collections.abc import Sequence

from reports.document import Block, Plot, Section, Table, format_number
from reports.metrics.summary import Analysis
from reports.pages.sections.time_split import first_token_table, gantt_frame, slowest_table, stack_frame, time_table
from reports.plots import request_plots

NOTE = (
    "Means of the requests that succeeded, in ms. Network is one round trip, estimated by the time to open a "
    "connection. Prefill is the server's mean prefill call, decode the rest of its inference time. Unexplained is the "
    "total minus all known parts."
)
FIRST_TOKEN_NOTE = (
    "Means in ms. Other is the client's TTFT minus a round trip and the server's validation, queue and prefill: "
    "routing, sending, and the difference between a mean prefill call and this load's prefill."
)
SLOWEST_NOTE = (
    "In ms, the slowest first. Waiting lasts from the intended start to the send and includes opening a connection. To "
    "first token and streaming are measured by the client. Only blocking calls report the server's stages."
)


def _stack(analyses: Sequence[Analysis]) -> list[Block]:
    frame = stack_frame(analyses)
    if not len(frame):
        return []
    words = frame["part"] + " " + frame["value_ms"].map(format_number) + " ms"
    parts = "; ".join(f"{run}: {', '.join(rows)}" for run, rows in words.groupby(frame["run"], sort=False))
    return [
        Plot(
            "time_stack",
            "Time breakdown of an average request",
            "Means of the requests that succeeded; the number is the total. A part below zero is only in the table.",
            f"Stacked bars. {parts}.",
            lambda size: request_plots.time_stack(frame, size),
            is_full_width=True,
            height=min(1.0, 0.34 + 0.12 * len(analyses)),
        )
    ]


def _gantt(analysis: Analysis) -> list[Block]:
    frame = gantt_frame(analysis)
    if not len(frame):
        return []
    count = frame["row"].nunique()
    longest = frame.groupby("row")["seconds"].sum().max()
    return [
        Plot(
            "slowest",
            "The slowest requests over time",
            f"{count} requests in the order of their start. Labels of a wide figure: number, input → output tokens.",
            f"Gantt chart of the {count} slowest requests; the longest took {format_number(longest)} s.",
            lambda size: request_plots.gantt(frame, size),
            is_full_width=True,
        )
    ]


def time_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    """The section of a report: means of each run with times, and the slowest requests of a single run."""
    blocks: list[Block] = _stack(analyses)
    tables = (
        ("An average request", time_table(analyses), NOTE),
        ("Time to first token", first_token_table(analyses), FIRST_TOKEN_NOTE),
    )
    for title, frame, note in tables:
        if len(frame):
            # The name of a single run is the title of its page.
            single = frame.rename(columns={"run": "request"}).assign(request="mean")
            blocks.append(Table(title, frame if len(analyses) > 1 else single, note))
    if len(analyses) == 1 and len(slowest := slowest_table(analyses[0])):
        blocks += [*_gantt(analyses[0]), Table("The slowest requests", slowest, SLOWEST_NOTE)]
    return (Section("Time breakdown", tuple(blocks)),) if blocks else ()
