"""Headers, keys, certificates and further fields of the body: sent with every request, stored without secrets."""

import json

import pytest

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import TargetError, UsageError
from loadgen.runner import measure
from loadgen.target.access import Access
from loadgen.target.open_target import open_target
from tests.support.measured_requests import measured
from tests.support.servers.certificate import self_signed
from tests.support.servers.stream_server import ServerState, stream_server

LOAD = {"requests": 3, "concurrency": 1, "input_tokens": "8", "output_tokens": "2", "warmup": 0}


def run(folder, command=(), **settings):
    config = parsing.load(BenchConfig, {**LOAD, **settings})
    with open_target(config, folder / "server.log") as target:
        return measure(config, target, folder / "run", command=command)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls_url(certificate):
    with stream_server(tls=certificate.server_context()) as (url, _):
        yield url


def test_a_certificate_of_an_unknown_authority_is_refused(tls_url, tmp_path):
    with pytest.raises(TargetError, match="certificate verify failed"):
        run(tmp_path, url=tls_url)


def test_a_server_is_measured_with_the_certificate_of_its_authority(tls_url, certificate, tmp_path):
    result = run(tmp_path, url=tls_url, ca_file=str(certificate.path))

    assert [record.status for record in measured(result)] == ["ok"] * 3


@pytest.mark.slow
def test_an_insecure_run_checks_no_certificate(tls_url, tmp_path):
    result = run(tmp_path, url=tls_url.replace("localhost", "127.0.0.1"), insecure="true")

    assert [record.status for record in measured(result)] == ["ok"] * 3


@pytest.mark.parametrize("content", [b"no certificate", b"\xff"])
def test_a_file_without_a_certificate_is_refused(tmp_path, content):
    path = tmp_path / "ca.pem"
    path.write_bytes(content)

    with pytest.raises(UsageError, match=r"`ca_file`.* PEM"):
        Access.of(BenchConfig(ca_file=str(path))).tls.context()


def test_headers_and_further_fields_go_with_every_request_and_values_are_not_stored(tmp_path):
    words = ["tgi-bench", "run", "--header", "X-Team=hunter-1", "--header=X-Other=hunter-2"]
    with stream_server(ServerState(has_info=False, owner="vllm")) as (url, state):
        run(
            tmp_path,
            words,
            url=url,
            header=["X-Team=hunter-1", "X-Other=a=hunter-2"],
            extra_body='{"top_k": 5, "stream_options": {"x": 1}}',
        )

    assert {request["headers"].get("X-Team") for request in state.requests} == {"hunter-1"}
    assert {request["headers"].get("X-Other") for request in state.requests} == {"a=hunter-2"}
    bodies = [request["body"] for request in state.requests if request["path"] != "/tokenize"]
    assert {body["top_k"] for body in bodies} == {5}
    options = {"include_usage": True, "continuous_usage_stats": True, "x": 1}
    assert [body["stream_options"] for body in bodies if body["stream"]][-1] == options
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["config"]["header"] == ["X-Team=***", "X-Other=***"]
    assert manifest["command"] == [*words[:3], "X-Team=***", "--header=X-Other=***"]
    texts = [path.read_text(errors="replace") for path in (tmp_path / "run").iterdir() if path.is_file()]
    assert not any("hunter" in text for text in texts)


def test_a_key_comes_from_a_variable(monkeypatch):
    config = BenchConfig(api_key_env="SOME_KEY")
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(UsageError, match="`api_key_env` is 'SOME_KEY', but this environment variable is not set"):
        Access.of(config)

    monkeypatch.setenv("SOME_KEY", "s3")

    assert Access.of(config).headers == {"Authorization": "Bearer s3"}


def test_fields_of_a_body_come_from_a_file(tmp_path):
    path = tmp_path / "body.json"
    path.write_text('{"parameters": {"top_k": 5}}')

    assert parsing.load(BenchConfig, {"extra_body": f"@{path}"}).extra_body == {"parameters": {"top_k": 5}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_body": "{"}, "`extra_body` is '{': not JSON"),
        ({"extra_body": "[1]"}, "must be a JSON object"),
        ({"extra_body": "@absent.json"}, "cannot read the file (No such file or directory)"),
        ({"extra_body": '{"max_tokens": 3}'}, "`extra_body` sets `max_tokens`, which the load determines"),
        ({"extra_body": '{"parameters": {"max_new_tokens": 3}}'}, "sets `max_new_tokens`"),
        ({"header": ["secret"]}, "`header.0` is ***: must be NAME=VALUE"),
        ({"header": ["X=a\r\nY: secret"]}, "`header.0` is ***: must be NAME=VALUE"),
        ({"api_key_env": "MY KEY"}, "`api_key_env` is ***: must be a variable's name: letters, digits and _"),
        ({"api_key_env": "1KEY"}, "`api_key_env` is ***: must be a variable's name"),
        ({"api_key_env": "KEY\n"}, "`api_key_env` is ***: must be a variable's name"),
        ({"api_key_env": ""}, "`api_key_env` is"),
        ({"api_key": "k", "api_key_env": "K"}, "`api_key` and `api_key_env` exclude each other"),
        ({"insecure": "true", "ca_file": "ca.pem"}, "`insecure` and `ca_file` exclude each other"),
    ],
)
def test_a_wrong_setting_of_a_request_is_refused(settings, message):
    with pytest.raises(UsageError) as refused:
        parsing.load(BenchConfig, settings)

    assert message in str(refused.value)
    assert "secret" not in str(refused.value)
