import json

import pytest

from loadgen.errors import TargetError
from loadgen.selftest.trap_behaviour import Behaviour
from loadgen.selftest.trap_server import trap_server
from loadgen.target.control import ControlClient
from loadgen.target.server_kind import OWN
from loadgen.target.telemetry import parse_prometheus

FAST = {"prefill_s": 0.01, "gap_s": 0.001}
BODY = json.dumps({"messages": [{"role": "user", "content": "a " * 32}], "max_tokens": 4, "stream": True}).encode()


def generate(control):
    status, body = control.post("/v1/chat/completions", BODY)
    return status, body


def metrics(control):
    return {name: value for name, _, value in parse_prometheus(control.get("/metrics")[1].decode())}


def test_the_trap_server_answers_counts_and_caches_prefixes():
    with trap_server(Behaviour(cache_block_tokens=16, **FAST)) as url:
        control = ControlClient(url)
        status, first = generate(control)
        second = generate(control)[1]
        counted = metrics(control)
        tokens = control.count_tokens("one two three", OWN.tokenize)
        control.close()

    assert status == 200
    assert b'"cached_tokens":0' in first
    assert b'"cached_tokens":32' in second
    assert first.endswith(b"data: [DONE]\n\n")
    assert (counted["vllm:request_success_total"], counted["vllm:prompt_tokens_total"]) == (2, 64)
    assert tokens == 3


def test_trust_T2_a_dropped_connection_has_no_answer():
    with trap_server(Behaviour(drop_every=1, **FAST)) as url:
        control = ControlClient(url)
        with pytest.raises(TargetError):
            generate(control)
        control.close()


def test_trust_T10_every_second_request_is_refused():
    with trap_server(Behaviour(refuse_every=2, **FAST)) as url:
        control = ControlClient(url)
        statuses = [generate(control)[0] for _ in range(4)]
        control.close()

    assert statuses == [200, 429, 200, 429]


def test_trust_T13_a_proxy_releases_whole_answers():
    with trap_server(Behaviour(release_s=0.05, **FAST)) as url:
        control = ControlClient(url)
        status, body = generate(control)
        control.close()

    assert (status, body.count(b'"content"')) == (200, 4)
