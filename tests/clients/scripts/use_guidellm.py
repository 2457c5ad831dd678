"""`guidellm` as a load tool: short runs at a concurrency, judged by the counts of its own report."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import TOKENIZER, URL, feature, run_features

REQUESTS, CONCURRENCY, INPUT_TOKENS, OUTPUT_TOKENS = 20, 4, 64, 16


def load(request_format: str) -> str:
    backend = {"kind": "openai_http", "target": URL, "request_format": request_format}
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [sys.executable, "-m", "guidellm", "run", "--disable-console", "--backend", json.dumps(backend)]
        command += ["--profile", f"kind=concurrent,streams={CONCURRENCY}"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
        command += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
        command += ["--output", f"kind=json,path={report}"]
        subprocess.run(command, check=True, cwd=directory, stdout=sys.stderr)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    expected = {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["request_totals"] == expected, metrics["request_totals"]
    tokens = metrics["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (OUTPUT_TOKENS, OUTPUT_TOKENS), tokens
    ttft_ms = metrics["time_to_first_token_ms"]["successful"]["mean"]
    return f"{REQUESTS} requests without an error, mean time to first token {ttft_ms:.0f} ms"


@feature
def completions_stream() -> str:
    return load("/v1/completions")


@feature
def chat_stream() -> str:
    return load("/v1/chat/completions")


if __name__ == "__main__":
    run_features()
