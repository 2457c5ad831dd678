import json

import pytest

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.redaction import redacted, redacted_argv
from loadgen.runner import measure
from loadgen.target.access import Access
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


@pytest.mark.parametrize(
    "word",
    [
        *("GITHUB_TOKEN=hunter", "NGROK_AUTHTOKEN=hunter", "TOKEN=hunter", "OPENAI_KEY=hunter", "authToken=hunter"),
        *("TGI_BENCH_JOIN_KEY=hunter", "TGI_TUNE_STORAGE_TOKEN=hunter", "DB_PASSWORD=hunter", "--token=hunter"),
        *("Authorization: Bearer hunter", "authorization:Basic hunter", "X-Api-Key: hunter", "curl -H 'bearer hunter'"),
        *("http://me:hunter@host/v1", "https://hunter@host", "redis://:hunter@h", "http://h/?api_key=hunter&n=1"),
        *("serve --token hunter --port 1", "FOO_SECRET=hunter serve", "sh -c 'TOKEN=hunter serve'"),
    ],
)
def test_hardening_S4_no_form_of_a_secret_is_shown(word):
    shown = redacted_argv(["run", word])[1]

    assert "hunter" not in shown
    assert "***" in shown


def test_hardening_S4_a_secret_flag_masks_the_next_word():
    assert redacted_argv(["--token", "hunter", "--hf-token", "hunter"]) == ["--token", "***", "--hf-token", "***"]


@pytest.mark.parametrize(
    "word",
    ["--max-total-tokens=9", "eos_token=</s>", "--tokenizer=t", "time_per_token_ms=3", "http://host:80/a?n=1", "a@b.c"],
)
def test_hardening_S4_settings_that_are_no_secret_stay(word):
    assert redacted_argv([word]) == [word]


def test_hardening_S4_the_refusal_of_a_url_shows_no_password():
    with pytest.raises(UsageError) as refused:
        parsing.load(BenchConfig, {"url": "http://me:hunter@host:80"})

    assert "hunter" not in str(refused.value)
    assert "without query or credentials" in str(refused.value)


def test_metrics_15_a_manifest_holds_no_secret(tmp_path):
    state = ServerState(config={"max_waiting_tokens": 20, "api_key": "hunter-1", "nested": {"hf_token": "hunter-2"}})
    config = BenchConfig(requests=3, concurrency=1, input_tokens="8", output_tokens="2", api_key="hunter-3")

    with stream_server(state) as (url, _):
        measure(
            config,
            Target(url, Access.with_key("hunter-3")),
            tmp_path / "r",
            command=["tgi-bench", "run", "--api-key", "hunter-3"],
        )

    texts = [path.read_text(errors="replace") for path in (tmp_path / "r").iterdir() if path.is_file()]
    assert not any("hunter" in text for text in texts)
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["target"]["config"] == {"max_waiting_tokens": 20, "api_key": "***", "nested": {"hf_token": "***"}}
