"""The board as text: every query of docs/grafana/board.json with its value now.

    python -m benchmarks.operations.board_values --prometheus http://localhost:9090

Needs a Prometheus that scrapes servers as the job `tgi`. A panel without a value is printed with `-`: a server without
drafts has no acceptance.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence

from benchmarks.operations.board import SCALES, BoardQuery, board_queries
from benchmarks.operations.prometheus import Prometheus


def board_lines(queries: Sequence[BoardQuery], values_of: Callable[[str], Sequence[float]]) -> Iterator[str]:
    """A line for each query, with the value of each of its series."""
    for query in queries:
        scale, unit = SCALES.get(query.unit, (1, ""))
        values = [value for value in values_of(query.expression) if value == value]
        text = ", ".join(f"{scale * value:.4g}{unit}" for value in values) or "-"
        yield f"{query.panel:<28}{query.legend:<28}{text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", required=True, metavar="URL", help="address of Prometheus")
    parser.add_argument("--job", default="tgi", help="name of the scrape job (%(default)s)")
    parser.add_argument("--rate", type=int, default=60, help="seconds that a rate is computed over (%(default)s)")
    args = parser.parse_args()
    for line in board_lines(board_queries(args.rate, args.job), Prometheus(args.prometheus).values):
        print(line)


if __name__ == "__main__":
    main()
