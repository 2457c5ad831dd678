"""A real Prometheus on loopback that scrapes every second, for tests of the board and the alerts."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.operations.prometheus import Prometheus
from tests.support.servers.ports import free_port

PROGRAM = shutil.which("prometheus")


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
