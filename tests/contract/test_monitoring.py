"""The Grafana board and the Prometheus alerts under docs/grafana: they name series that the router has."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from reference_server.router.telemetry.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"
GRAFANA = DOCS / "grafana"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on PATH (package prometheus)"
)


def rules() -> list[dict[str, object]]:
    return [rule for group in yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, object]]:
    return [panel for panel in json.loads((GRAFANA / "board.json").read_text())["panels"] if panel["type"] != "row"]


def series_of_the_router() -> dict[str, str]:
    """Kind of each name that a query may have."""
    return {each.name: each.kind for each in Metrics(1024, 2048).series}


@pytest.mark.parametrize("file", ["board.json", "alerts.yml", "alerts_test.yml"])
def test_every_series_of_the_board_and_the_alerts_is_one_of_the_routers(file: str):
    kinds = series_of_the_router()

    named = set(re.findall(r"\b(tgi_\w+)", (GRAFANA / file).read_text()))

    assert len(named) >= 8
    for name in named:
        histogram = re.sub("_(bucket|sum|count)$", "", name)
        assert name in kinds or kinds.get(histogram) == "histogram", name


def test_each_panel_has_a_title_a_description_a_unit_and_a_place_of_its_own():
    board = panels()

    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board}
    assert len(places) == len(board)
    for panel in board:
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_the_page_explains_every_alert():
    page = (DOCS / "operations.md").read_text()

    assert re.findall(r"^\| `(Tgi\w+)` \|", page, re.MULTILINE) == [rule["alert"] for rule in rules()]


def test_every_alert_fires_in_a_unit_test():
    cases = yaml.safe_load((GRAFANA / "alerts_test.yml").read_text())["tests"]

    fired = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case["exp_alerts"]}

    assert fired == {rule["alert"] for rule in rules()}


@needs_promtool
def test_the_alerts_pass_their_unit_tests():
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"],
        cwd=GRAFANA,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
