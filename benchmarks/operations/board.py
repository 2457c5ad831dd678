"""The Grafana board: its panels with their queries, their units and where they are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BOARD = Path(__file__).parents[2] / "docs" / "grafana" / "board.json"
COLUMNS = 24
"""Of a board's grid."""
SCALES: Mapping[str, tuple[float, str]] = {"percentunit": (100, " %"), "s": (1000, " ms"), "bytes": (2**-20, " MiB")}


@dataclass(frozen=True, slots=True)
class BoardQuery:
    """One query of a panel. `legend` may have labels in braces, `unit` is Grafana's name."""

    panel: str
    legend: str
    expression: str
    unit: str

    @property
    def name(self) -> str:
        return f"{self.panel}: {self.legend}"

    def series_name(self, labels: Mapping[str, str]) -> str:
        """The legend with the labels of a series filled in."""
        return _filled(self.legend, {f"{{{{{label}}}}}": value for label, value in labels.items()})


@dataclass(frozen=True, slots=True)
class BoardPanel:
    """A panel, or a row's heading without queries. Places and sizes in cells of the grid; `y` grows downwards."""

    title: str
    x: int
    y: int
    width: int
    height: int
    queries: tuple[BoardQuery, ...]


def board_panels(rate_s: int, job: str = "tgi", instance: str = ".*") -> list[BoardPanel]:
    """The panels with the variables of the board filled in, as Grafana does; a rate is over `rate_s` seconds."""
    fill = {"$job": job, "$instance": instance, "$__rate_interval": f"{rate_s}s"}
    panels = []
    for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"]:
        queries = tuple(
            BoardQuery(
                panel["title"],
                target["legendFormat"],
                _filled(target["expr"], fill),
                panel["fieldConfig"]["defaults"].get("unit", "short"),
            )
            for target in panel.get("targets", ())
        )
        place = panel["gridPos"]
        panels.append(BoardPanel(panel["title"], place["x"], place["y"], place["w"], place["h"], queries))
    return panels


def board_queries(rate_s: int, job: str = "tgi", instance: str = ".*") -> list[BoardQuery]:
    """The queries of all panels."""
    return [query for panel in board_panels(rate_s, job, instance) for query in panel.queries]


def _filled(text: str, fill: Mapping[str, str]) -> str:
    for variable, value in fill.items():
        text = text.replace(variable, value)
    return text
