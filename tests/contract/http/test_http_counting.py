"""`/metrics` parses as Prometheus text, and its counters agree with the answers that clients got."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers.serving import Served, events_of, serve
from tests.support.wire.scripted_shard import Reply

USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"max_new_tokens": 3}

#: (path, body, status, generations that succeed, failures by cause, what `tgi_request_count` grows by)
MIX: list[tuple[str, dict[str, Any], int, int, dict[str, int], int]] = [
    ("/generate", {"inputs": "a b", "parameters": PARAMETERS}, 200, 1, {}, 1),
    ("/generate", {"inputs": "a", "parameters": {**PARAMETERS, "best_of": 2, "do_sample": True}}, 200, 1, {}, 1),
    ("/generate", {"inputs": "", "parameters": PARAMETERS}, 422, 0, {"validation": 1}, 1),
    ("/generate", {"inputs": 5}, 422, 0, {}, 0),
    ("/generate", {"inputs": "fail please", "parameters": PARAMETERS}, 424, 0, {"generation": 1}, 1),
    ("/generate_stream", {"inputs": "a", "parameters": PARAMETERS}, 200, 1, {}, 1),
    ("/generate_stream", {"inputs": "a", "parameters": {"top_k": 0}}, 200, 0, {"validation": 1}, 1),
    ("/", {"inputs": "a", "parameters": PARAMETERS, "stream": True}, 200, 1, {}, 1),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, 200, 2, {}, 3),
    ("/v1/completions", {"prompt": "a", "suffix": "x"}, 422, 0, {"validation": 1}, 2),
    ("/v1/completions", {"prompt": ["a", ""], "max_tokens": 2, "stream": True}, 200, 1, {"validation": 1}, 3),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 2}, 200, 1, {}, 2),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 2, "stream": True, "n": 2}, 200, 2, {}, 2),
    ("/v1/chat/completions", {"messages": [{"role": "raise", "content": ""}]}, 422, 0, {"template": 1}, 2),
    ("/chat_tokenize", {"messages": USER}, 200, 0, {}, 1),
    ("/tokenize", {"inputs": "a b"}, 200, 0, {}, 0),
    ("/invocations", {"prompt": "a", "max_tokens": 2}, 200, 1, {}, 2),
    ("/vertex", {"instances": [{"inputs": "a", "parameters": PARAMETERS}]}, 200, 1, {}, 2),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}}, 200, 1, {}, 1),
    ("/nowhere", {}, 404, 0, {}, 0),
]
REPEATS = 10
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'raise' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
)


def script(request: Any) -> Reply:
    return Reply((" a", " b", " c", " d"), fail_after=0 if "fail" in request.text else None)


async def read_series(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample, by name and labels, as Prometheus' own parser reads them; it adds `_total` to a counter's."""
    text = (await served.client.get("/metrics")).text
    return {
        (sample.name.removesuffix("_total"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_counters_add_up_after_two_hundred_mixed_requests():
    assert len(MIX) * REPEATS == 200
    statuses: Counter[tuple[str, int]] = Counter()
    tokens = 0
    async with serve(script=script, template=TEMPLATE) as served:

        async def send(path: str, body: dict[str, Any]) -> httpx.Response:
            return await served.client.post(path, json=body)

        for _ in range(REPEATS):
            # One that fails takes its batch with it: these run alone.
            alone = [entry for entry in MIX if "fail please" in str(entry[1])]
            together = [entry for entry in MIX if entry not in alone]
            answers = await asyncio.gather(*(send(path, body) for path, body, *_ in together))
            answers += [await send(path, body) for path, body, *_ in alone]
            for answer, entry in zip(answers, together + alone, strict=True):
                assert answer.status_code == entry[2], (entry, answer.text)
                statuses[entry[0], answer.status_code] += 1
                if entry[0] == "/generate_stream" and entry[3]:
                    tokens += len(events_of(answer.text))
        series = await read_series(served)
        permits = served.services.infer.permits.free

    failures: Counter[str] = Counter()
    for *_, causes, _ in MIX:
        failures.update({err: count * REPEATS for err, count in causes.items()})
    succeeded = sum(entry[3] for entry in MIX) * REPEATS
    assert sum(statuses.values()) == 200
    assert tokens == 3 * REPEATS
    assert series["tgi_request_count", ()] == sum(entry[5] for entry in MIX) * REPEATS
    assert series["tgi_request_success", ()] == succeeded
    assert {
        dict(labels)["err"]: value for (name, labels), value in series.items() if name == "tgi_request_failure"
    } == failures
    for name in ("duration", "validation_duration", "queue_duration", "inference_duration", "generated_tokens"):
        assert series[f"tgi_request_{name}_count", ()] == succeeded
        assert series[f"tgi_request_{name}_bucket", (("le", "+Inf"),)] == succeeded
    assert (series["tgi_queue_size", ()], series["tgi_batch_current_size", ()], permits) == (0, 0, 128)
    calls = {
        outcome: sum(value for (name, _), value in series.items() if name == f"tgi_batch_inference_{outcome}")
        for outcome in ("count", "success", "failure")
    }
    assert calls["count"] == calls["success"] + calls["failure"]
    assert calls["failure"] == REPEATS


@pytest.mark.parametrize("name", ["tgi_request_count", "tgi_batch_inference_count"])
async def test_prometheus_parser_finds_types_help_and_growing_buckets(name: str):
    async with serve() as served:
        await served.generate(max_new_tokens=4, top_n_tokens=1)
        text = (await served.client.get("/metrics")).text

    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families[name].type == "counter"
    assert all(family.documentation for family in families.values())
    assert families["tgi_request_skipped_tokens"].type == "summary"
    assert families["tgi_queue_size"].type == "gauge"
    for family in families.values():
        assert family.type in ("counter", "gauge", "histogram", "summary")
        if family.type == "histogram":
            by_labels: dict[tuple[tuple[str, str], ...], list[float]] = {}
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    rest = tuple(item for item in sample.labels.items() if item[0] != "le")
                    by_labels.setdefault(rest, []).append(sample.value)
            assert all(counts == sorted(counts) for counts in by_labels.values())
