"""`aiperf` as a load tool: short runs at a concurrency, judged by the counts of its own report."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import TOKENIZER, URL, feature, run_features

REQUESTS, CONCURRENCY, INPUT_TOKENS, OUTPUT_TOKENS = 20, 4, 64, 16


def load(endpoint: str, *flags: str) -> tuple[float, str]:
    """Mean output tokens of its report, and what to show."""
    with tempfile.TemporaryDirectory() as directory:
        command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--model", "tgi", "--url", URL]
        command += ["--endpoint-type", endpoint, "--streaming", *flags]
        name = "ignore_eos_token" if endpoint == "huggingface-generate" else "ignore_eos"
        command += ["--extra-inputs", f"{name}:true", "--random-seed", "1"]
        command += ["--concurrency", str(CONCURRENCY), "--request-count", str(REQUESTS), "--tokenizer", TOKENIZER]
        command += ["--prompt-input-tokens-mean", str(INPUT_TOKENS), "--prompt-output-tokens-mean", str(OUTPUT_TOKENS)]
        command += ["--output-artifact-dir", directory, "--ui", "none", "--no-gpu-telemetry"]
        subprocess.run(command, check=True, cwd=directory, stdout=sys.stderr)
        report = json.loads((Path(directory) / "profile_export_aiperf.json").read_text())
    assert report["error_summary"] == [], report["error_summary"]
    assert report["request_error_rate"]["avg"] == 0
    assert report["request_count"]["avg"] == REQUESTS
    ttft_ms = report["time_to_first_token"]["avg"]
    shown = f"{REQUESTS} requests without an error, mean time to first token {ttft_ms:.0f} ms"
    return report["output_sequence_length"]["avg"], shown


def load_with_usage(endpoint: str) -> str:
    """Lengths as the server reports them; a text that is tokenized again may have fewer tokens."""
    tokens, shown = load(endpoint, "--use-server-token-count")
    assert tokens == OUTPUT_TOKENS, tokens
    return shown


@feature
def generate_stream() -> str:
    tokens, shown = load("huggingface-generate")
    assert OUTPUT_TOKENS / 2 < tokens <= OUTPUT_TOKENS, tokens
    return shown


@feature
def completions_stream() -> str:
    return load_with_usage("completions")


@feature
def chat_stream() -> str:
    return load_with_usage("chat")


if __name__ == "__main__":
    run_features()
