"""The launcher with its real children: two shards of the trained preset, one request, then a shard is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from reference_server.launcher.guardian import is_alive, start_time

ROOT = Path(__file__).parents[2]
SMALL = ("--max-input-tokens", "200", "--max-total-tokens", "256", "--max-batch-prefill-tokens", "256",
         "--cpu-memory-gib", "0.1", "--dtype", "float32")  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def generate(port: int, inputs: str) -> str:
    body = json.dumps({"inputs": inputs, "parameters": {"max_new_tokens": 5}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.loads(response.read())["generated_text"])


def wait_until_healthy(port: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(process.communicate()[0])


def children_of(pid: int) -> dict[int, str]:
    """Command line by pid."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child): Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in pids}


def test_two_shards_serve_and_a_killed_one_ends_everything(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--model-id", "preset:tiny-llama", "--num-shard", "2", "--hostname", "127.0.0.1", "--port", str(port))
    process = subprocess.Popen(
        [sys.executable, "-m", "reference_server.launcher.cli", *flags, *SMALL],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until_healthy(port, process)
        text = generate(port, "The river")
        children = children_of(process.pid)
        starts = {pid: start_time(pid) for pid in children}
        shard = [pid for pid, command in children.items() if " serve preset:tiny-llama " in command][1]
        os.kill(shard, signal.SIGKILL)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.communicate()

    assert text
    assert process.returncode == 1
    assert "Error: ShardFailed: shard 1 was killed by signal 9 (SIGKILL)" in output
    assert [command for pid, command in children.items() if is_alive(pid, starts[pid] or "")] == []
    assert list(tmp_path.glob("text-generation-*")) == []
