"""A real Prometheus on loopback, for tests of the board and the alerts."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.servers.ports import free_port

PROGRAM = shutil.which("prometheus")


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that scrapes every second."""

    url: str

    def api(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of `/api/v1`."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as response:
            return json.load(response)["data"]

    def values(self, query: str) -> list[float]:
        """The value of each series of an instant query."""
        return [float(each["value"][1]) for each in self.api("query", query=query)["result"]]


@contextlib.contextmanager
def prometheus(folder: Path, targets: list[str], rules: Path) -> Iterator[Prometheus]:
    """Scrape `targets` (`host:port`) as the job `tgi`, and evaluate the rules of a file."""
    assert PROGRAM is not None, "prometheus is not on PATH"
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "tgi", "static_configs": [{"targets": targets}]}],
    }
    file = folder / "prometheus.json"
    file.write_text(json.dumps(config))
    server = Prometheus(f"http://127.0.0.1:{free_port()}")
    command = [PROGRAM, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append(f"--web.listen-address={server.url.removeprefix('http://')}")
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_ready(server, process, folder / "log")
            yield server
        finally:
            process.terminate()


def _wait_until_ready(server: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/-/ready", timeout=5):
            return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.1)
