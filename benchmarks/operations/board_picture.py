"""The board as a picture: every panel of docs/grafana/board.json at its place, drawn from the values of a Prometheus.

    python -m benchmarks.operations.board_picture --prometheus http://localhost:9090 --minutes 10 --out board.png

Needs a Prometheus that scrapes servers as the job `tgi`. Grafana is not needed, so the picture shows which panels have
data and how they are arranged, not Grafana's own drawing.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.operations.board import COLUMNS, SCALES, BoardPanel, BoardQuery, board_panels
from benchmarks.operations.prometheus import Prometheus, Series
from reports.plots.figure import PALETTE, STYLE

CELL_INCHES = 0.56, 0.32
"""Width and height of a cell of the grid."""
COLOURS = [PALETTE[f"series-{index}"] for index in range(6)]


def draw_board(panels: Sequence[BoardPanel], series_of: Callable[[BoardQuery], Sequence[Series]]) -> Figure:
    """All panels at their places; the time axis is in seconds since the first value of any panel."""
    found = {query.name: series_of(query) for panel in panels for query in panel.queries}
    times_s = [point[0] for each in found.values() for series in each for point in series.points]
    start_s = min(times_s, default=0.0)
    rows = max(panel.y + panel.height for panel in panels)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(COLUMNS * CELL_INCHES[0], rows * CELL_INCHES[1]), facecolor="white")
        for panel in panels:
            top = 1 - panel.y / rows
            if not panel.queries:
                figure.text(0.01, top - 0.8 / rows, panel.title, size=11, weight="bold")
                continue
            # A margin for the labels of the axes inside the panel's cells.
            place = (
                (panel.x + 1.2) / COLUMNS,
                top - (panel.height - 1.6) / rows,
                (panel.width - 1.6) / COLUMNS,
                (panel.height - 3.0) / rows,
            )
            axes = figure.add_axes(place)
            _draw_panel(axes, panel, found, start_s)
            axes.set_xlim(0, max(times_s, default=1.0) - start_s)
    return figure


def _draw_panel(axes: Axes, panel: BoardPanel, found: dict[str, Sequence[Series]], start_s: float) -> None:
    scale, unit = SCALES.get(panel.queries[0].unit, (1, ""))
    for query in panel.queries:
        for series in found[query.name]:
            times = [at - start_s for at, _ in series.points]
            values = [scale * value for _, value in series.points]
            colour = COLOURS[len(axes.lines) % len(COLOURS)]
            axes.plot(times, values, color=colour, linewidth=1.2, label=query.series_name(series.labels))
    axes.set_title(f"{panel.title}{f',{unit}' if unit else ''}", loc="left", weight="bold", pad=5)
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.12), ncols=3, frameon=False, fontsize=7.5)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes, color=PALETTE["muted"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", required=True, metavar="URL", help="address of Prometheus")
    parser.add_argument("--job", default="tgi", help="name of the scrape job (%(default)s)")
    parser.add_argument("--rate", type=int, default=60, help="seconds that a rate is computed over (%(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="minutes until now that are drawn (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("board.png"), help="the picture (%(default)s)")
    args = parser.parse_args()
    source, end_s = Prometheus(args.prometheus), time.time()
    start_s = end_s - 60 * args.minutes

    def series_of(query: BoardQuery) -> list[Series]:
        return source.series(query.expression, start_s, end_s, max(1.0, 60 * args.minutes / 300))

    draw_board(board_panels(args.rate, args.job), series_of).savefig(args.out, dpi=80)
    print(args.out)


if __name__ == "__main__":
    main()
