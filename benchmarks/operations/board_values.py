"""The board as text: every query of docs/grafana/board.json with its value now.

    python -m benchmarks.operations.board_values --prometheus http://localhost:9090

Needs a Prometheus that scrapes servers as the job `tgi`. A panel without a value is printed with `-`: a server without
drafts has no acceptance.
"""

import argparse
import json
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parents[2] / "docs" / "grafana" / "board.json"
SCALES: Mapping[str, tuple[float, str]] = {"percentunit": (100, " %"), "s": (1000, " ms"), "bytes": (2**-20, " MiB")}


@dataclass(frozen=True, slots=True)
class BoardQuery:
    """One query of a panel. `unit`: Grafana's name."""

    panel: str
    legend: str
    expression: str
    unit: str

    @property
    def name(self) -> str:
        return f"{self.panel}: {self.legend}"


def board_queries(rate_s: int, job: str = "tgi", instance: str = ".*") -> list[BoardQuery]:
    """The queries of the board with its variables filled in, as Grafana does; a rate is over `rate_s` seconds."""
    fill = {"$job": job, "$instance": instance, "$__rate_interval": f"{rate_s}s"}
    return [
        BoardQuery(
            panel["title"],
            target["legendFormat"],
            _filled(target["expr"], fill),
            panel["fieldConfig"]["defaults"].get("unit", "short"),
        )
        for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"]
        for target in panel.get("targets", ())
    ]


def board_lines(queries: Sequence[BoardQuery], values_of: Callable[[str], Sequence[float]]) -> Iterator[str]:
    """A line for each query, with the value of each of its series."""
    for query in queries:
        scale, unit = SCALES.get(query.unit, (1, ""))
        values = [value for value in values_of(query.expression) if value == value]
        text = ", ".join(f"{scale * value:.4g}{unit}" for value in values) or "-"
        yield f"{query.panel:<28}{query.legend:<28}{text}"


def _filled(expression: str, fill: Mapping[str, str]) -> str:
    for variable, text in fill.items():
        expression = expression.replace(variable, text)
    return expression


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", required=True, metavar="URL", help="address of Prometheus")
    parser.add_argument("--job", default="tgi", help="name of the scrape job (%(default)s)")
    parser.add_argument("--rate", type=int, default=60, help="seconds that a rate is computed over (%(default)s)")
    args = parser.parse_args()

    def values_of(expression: str) -> list[float]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{args.prometheus}/api/v1/query?{query}", timeout=10) as response:
            found: dict[str, Any] = json.load(response)
        return [float(each["value"][1]) for each in found["data"]["result"]]

    for line in board_lines(board_queries(args.rate, args.job), values_of):
        print(line)


if __name__ == "__main__":
    main()
