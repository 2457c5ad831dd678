import json

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.redaction import redacted, redacted_argv
from loadgen.runner import measure
from loadgen.target.target import Target
from tests.support.servers.stream_server import ServerState, stream_server


def test_secrets_in_nested_answers_are_masked_and_settings_are_not():
    told = {
        "api_key": "s1",
        "max_total_tokens": 4096,
        "tokenizer_name": "t",
        "hub": {"hf_token": "s2", "revision": None, "password": ""},
        "servers": [{"Authorization": "Bearer s3"}],
    }

    assert redacted(told) == {
        "api_key": "***",
        "max_total_tokens": 4096,
        "tokenizer_name": "t",
        "hub": {"hf_token": "***", "revision": None, "password": ""},
        "servers": [{"Authorization": "***"}],
    }


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["tgi-bench", "run", "--api-key", "s1"], ["tgi-bench", "run", "--api-key", "***"]),
        (["run", "--server", "serve --api-key s1  --port 1"], ["run", "--server", "serve --api-key ***  --port 1"]),
        (["run", "--api-key=s1", "--seed", "3"], ["run", "--api-key=***", "--seed", "3"]),
        (["run", "--slo", "ttft_p95_ms < 500"], ["run", "--slo", "ttft_p95_ms < 500"]),
    ],
)
def test_secrets_on_command_lines_are_masked(argv, shown):
    assert redacted_argv(argv) == shown


def test_metrics_15_a_manifest_holds_no_secret(tmp_path):
    state = ServerState(config={"max_waiting_tokens": 20, "api_key": "hunter-1", "nested": {"hf_token": "hunter-2"}})
    config = BenchConfig(requests=3, concurrency=1, input_tokens="8", output_tokens="2", api_key="hunter-3")

    with stream_server(state) as (url, _):
        measure(config, Target(url, "hunter-3"), tmp_path / "r", command=["tgi-bench", "run", "--api-key", "hunter-3"])

    texts = [path.read_text(errors="replace") for path in (tmp_path / "r").iterdir() if path.is_file()]
    assert not any("hunter" in text for text in texts)
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["target"]["config"] == {"max_waiting_tokens": 20, "api_key": "***", "nested": {"hf_token": "***"}}
