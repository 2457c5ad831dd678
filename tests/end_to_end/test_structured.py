"""Structured answers of a launched server, as the load generator checks them."""

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.runner import measure
from loadgen.target.target import Target
from tests.support.measured_requests import measured


@pytest.mark.slow
@pytest.mark.parametrize(("api", "tools"), [("tgi", 0.0), ("openai-chat", 0.5)])
def test_servers_6_every_complete_structured_answer_of_the_bundled_server_is_valid(server, tmp_path, api, tools):
    config = BenchConfig(
        concurrency=4, requests=24, warmup=0, input_tokens="16", output_tokens="160", api=api, structured=0.5
    ).model_copy(update={"structured_tools": tools})

    result = measure(config, Target(server.url), tmp_path / "r")

    structured = [record for record in measured(result) if record.constraint is not None]
    assert {record.status for record in measured(result)} == {"ok"}
    assert len(structured) >= 6
    assert {record.validity for record in structured} <= {"valid", "cut"}
    assert sum(record.validity == "valid" for record in structured) > len(structured) / 2
    free = [record for record in measured(result) if record.constraint is None]
    assert {record.output_tokens for record in free} == {160}
