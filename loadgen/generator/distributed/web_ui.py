"""locust's web UI on the master of a run, with LLM metrics added: shows and stops a load.

The command line defines the load, so the page's form for a new load is refused. By default the page is served on the
loopback interface only. Requests from pages of other sites are refused.
"""

import contextlib
import html
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flask
import gevent
import locust.env

from loadgen.config.distribution import Address
from loadgen.errors import MeasurementError

CHARTS = Path(__file__).with_name("llm_charts.html")
# Until the load starts, locust's page would have a form for a new load and would stay there.
WAITING = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="1">
<meta name="color-scheme" content="light dark"><title>tgi-bench</title></head>
<body style="font-family: system-ui, sans-serif; margin: 2rem"><p>The load is being prepared. This page opens the charts
when it starts.</p></body></html>
"""
START_S = 5.0
HISTORY = 3_600

# Chart key: title, and the lines by label; each line names a number of `WebPage.update`.
CHART_LINES: dict[str, tuple[str, dict[str, str]]] = {
    "ttft": ("TTFT (ms)", {"p50": "ttft_p50_ms", "p95": "ttft_p95_ms"}),
    "tpot": ("TPOT (ms)", {"p50": "tpot_p50_ms", "p95": "tpot_p95_ms"}),
    "tokens": ("Output tokens per second", {"tokens/s": "output_tokens_per_s"}),
    "streams": ("Running streams", {"in flight": "in_flight"}),
}
TABLE = [
    {"key": "metric", "title": "Metric"},
    {"key": "now", "title": "Now"},
    {"key": "p50", "title": "p50"},
    {"key": "p95", "title": "p95"},
]


class WebPage:
    """The page of one run. `on_stop` ends the load; `report` is written after it."""

    def __init__(
        self, environment: locust.env.Environment, address: Address, on_stop: Callable[[], None], report: Path
    ) -> None:
        self._address = address
        self._report = report
        self._on_stop = on_stop
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._previous: tuple[float, int] = (0.0, 0)
        self._ui = environment.create_web_ui(address.host, address.port, delayed_start=True)
        self._ui.template_args |= {
            "extended_tabs": [{"title": "LLM", "key": "llm"}],
            "extended_tables": [{"key": "llm", "structure": TABLE}],
        }
        app = self._ui.app
        app.debug = False
        app.before_request(self._intercept)
        app.after_request(self._extend)
        app.add_url_rule("/llm/history", "llm_history", lambda: flask.jsonify(list(self._history)))

    def start(self) -> str:
        """Start serving; returns the URL. Raises MeasurementError if the address is in use."""
        self._ui.start()
        deadline_s = time.monotonic() + START_S
        while not (self._ui.server is not None and self._ui.server.started):
            if self._ui.greenlet.ready() or time.monotonic() > deadline_s:
                raise MeasurementError(f"the web UI cannot listen at {self._address}; choose another --web HOST:PORT")
            gevent.sleep(0.01)
        return f"http://{Address(self._address.host, self._ui.server.server_port)}"

    def stop(self) -> None:
        with contextlib.suppress(AttributeError):  # never started
            self._ui.stop()

    def update(self, live: Mapping[str, Any]) -> None:
        """Add the numbers of one progress message."""
        t_s, tokens = float(live["t_s"]), int(live["tokens_out"])
        seconds, new_tokens = t_s - self._previous[0], tokens - self._previous[1]
        self._previous = (t_s, tokens)
        self._history.append(
            {
                "t_s": round(t_s, 1),
                "in_flight": live["in_flight"],
                "completed": live["completed"],
                "failed": live["failed"],
                "output_tokens_per_s": round(new_tokens / seconds, 1) if seconds > 0 else None,
                **{f"{name}_ms": _ms(live[f"{name}_s"]) for name in ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95")},
            }
        )

    def _intercept(self) -> "flask.Response | tuple[flask.Response, int] | None":
        """Refuse other sites' pages and new loads; handle the stop button. None: locust handles the request."""
        request = flask.request
        if self._address.is_loopback and not Address.parse("host", request.host, self._address).is_loopback:
            return flask.jsonify(message="this page is served on the loopback interface only"), 403
        # A browser sends no origin for an image, whose address may be that of the stop button.
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "none")
        if site not in ("same-origin", "none") or (origin is not None and origin.partition("//")[2] != request.host):
            return flask.jsonify(message="pages of other sites may not read or stop this load"), 403
        if request.path == "/stop":
            self._on_stop()
            return flask.jsonify(success=True, message="Test stopped")
        if request.path == "/" and not self._history:
            return flask.Response(WAITING, mimetype="text/html")
        if request.path in ("/swarm", "/user"):
            return flask.jsonify(success=False, message="The command line defines the load; it is running.")
        return None

    def _extend(self, response: flask.Response) -> flask.Response:
        """Add LLM metrics to locust's statistics and charts to its page."""
        if response.status_code != 200:
            return response
        if flask.request.path == "/stats/requests":
            response.set_data(
                json.dumps(response.get_json() | {"extended_stats": [{"key": "llm", "data": self._rows()}]})
            )
        elif flask.request.path == "/" and self._history and (page := response.get_data(as_text=True)):
            lines = {key: {"title": title, "lines": lines} for key, (title, lines) in CHART_LINES.items()}
            charts = CHARTS.read_text(encoding="utf-8").replace("__CHARTS__", json.dumps(lines))
            charts = charts.replace("__REPORT__", html.escape(str(self._report)))
            head, end, tail = page.rpartition("</body>")
            response.set_data(head + charts + end + tail)
        return response

    def _rows(self) -> list[dict[str, Any]]:
        now = self._history[-1] if self._history else {}
        spread = [
            {"metric": name.upper() + " (ms)", "p50": now.get(f"{name}_p50_ms"), "p95": now.get(f"{name}_p95_ms")}
            for name in ("ttft", "tpot")
        ]
        single = {
            "Output tokens per second": "output_tokens_per_s",
            "Running streams": "in_flight",
            "Completed requests": "completed",
            "Failed requests": "failed",
        }
        return [{"name": row["metric"], **row} for row in spread] + [
            {"name": title, "metric": title, "now": now.get(name)} for title, name in single.items()
        ]


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s * 1e3, 2)
