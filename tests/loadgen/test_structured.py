"""Structured answers against scripted servers: the requests, the check of each answer, the report and the gate."""

import http.server
import json
import threading
import time

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.runner import measure
from loadgen.target.target import Target
from loadgen.workloads.structured import Constraint, Kind, StructuredShare, Validity, read_schemas
from reports.gate.compare import judge
from reports.gate.comparison import CompareOptions
from reports.gate.side_run import Pair, SideRun
from reports.metrics.summary import Analysis, metric_value, summarize
from reports.pages.run_page import build_run_report
from reports.renderers.markdown import render
from tests.support.measured_requests import measured

VALID = {"label": "neutral", "score": 1}
# Cycle of answers to structured requests: 2 of 4 are valid.
ANSWERS = (json.dumps(VALID), json.dumps({"label": "none"}), json.dumps(VALID), '{"label": "neu')
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["neutral"]}, "score": {"type": "integer"}},
    "required": ["label", "score"],
}
PLAIN_GAP_S, STRUCTURED_GAP_S = 0.004, 0.012


class Handler(http.server.BaseHTTPRequestHandler):
    """Chat completions: a structured answer is slower by a known factor and cycles through `ANSWERS`."""

    protocol_version = "HTTP/1.1"
    bodies: list[dict]
    count: dict[str, int]

    def log_message(self, *args):
        pass

    def do_GET(self):
        found = self.path == "/v1/models"
        self.reply(200 if found else 404, {"data": [{"id": "m", "owned_by": "vllm"}]} if found else {})

    def reply(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self.reply(200, {"count": len(body["prompt"].split()) + 1})
            return
        self.bodies.append(body)
        usage = {"prompt_tokens": 9, "completion_tokens": 8, "total_tokens": 17}
        if not body.get("stream"):
            choice = {"message": {"content": "x"}, "finish_reason": "length"}
            self.reply(200, {"choices": [choice], "usage": usage})
            return
        is_tool = "tools" in body
        is_structured = is_tool or "response_format" in body
        text, reason = "one two three four five six seven eight", "length"
        if is_structured:
            self.count["structured"] = self.count.get("structured", -1) + 1
            text = ANSWERS[self.count["structured"] % 4]
            reason = "length" if text == ANSWERS[3] else "stop"
        size = -(-len(text) // 8)
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.close_connection = True
        self.end_headers()
        for part in parts:
            time.sleep(STRUCTURED_GAP_S if is_structured else PLAIN_GAP_S)
            call = {"tool_calls": [{"index": 0, "function": {"name": "t", "arguments": part}}]}
            self.event({"choices": [{"delta": call if is_tool else {"content": part}, "finish_reason": None}]})
        self.event({"choices": [{"delta": {}, "finish_reason": reason}]})
        self.event({"choices": [], "usage": usage | {"completion_tokens": len(parts)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture
def server():
    handler = type("Scripted", (Handler,), {"bodies": [], "count": {}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        serving.daemon_threads = True
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}", handler
        serving.shutdown()


@pytest.fixture
def schemas(tmp_path):
    file = tmp_path / "schemas.jsonl"
    file.write_text(json.dumps({"name": "sentiment", "schema": SCHEMA}) + "\n")
    return str(file)


def run(url, schemas, tmp_path, **load):
    config = BenchConfig(
        url=url,
        structured=0.5,
        structured_tools=0.5,
        schemas_file=schemas,
        concurrency=1,
        warmup=0,
        requests=80,
        input_tokens="8",
        output_tokens="8",
        **load,
    )
    return measure(config, Target(url), tmp_path / "r")


@pytest.mark.slow
def test_servers_6_structured_requests_are_drawn_sent_checked_and_compared_with_the_others(server, schemas, tmp_path):
    url, handler = server

    result = run(url, schemas, tmp_path)

    share = StructuredShare(0.5, 0.5, [("sentiment", SCHEMA)])
    expected = {record.prompt_id: share.of(record.prompt_id) for record in measured(result)}
    for record in measured(result):
        drawn = expected[record.prompt_id]
        assert record.constraint == (None if drawn is None else drawn.kind)
    sent = [body for body in handler.bodies if body.get("stream") and body["max_tokens"] == 8]
    for body in sent:
        if "response_format" in body or "tools" in body:
            assert "ignore_eos" not in body
            assert "min_tokens" not in body
            assert body["max_tokens"] == 8
        else:
            assert body["ignore_eos"] is True
    formats = [body["response_format"] for body in sent if "response_format" in body]
    assert formats[0]["json_schema"]["schema"] == SCHEMA
    tools = [body for body in sent if "tools" in body]
    assert tools[0]["tool_choice"] == {"type": "function", "function": {"name": "sentiment"}}

    summary = summarize(result)
    free, *kinds = summary["structured"]
    assert [row["kind"] for row in kinds] == ["schema", "tool"]
    assert free["requests"] == sum(drawn is None for drawn in expected.values())
    assert sum(row["requests"] for row in kinds) + free["requests"] == 80
    counts = {cause: sum(row["causes"].get(cause, 0) for row in kinds) for cause in ("cut", "not_in_schema")}
    structured = sum(row["requests"] for row in kinds)
    assert abs(counts["cut"] - structured / 4) <= 1
    assert abs(counts["not_in_schema"] - structured / 4) <= 1
    rate = summary["rates"]["structured_validity"]
    assert rate["value"] == pytest.approx(0.5, abs=0.03)
    assert rate["lo"] < 0.5 < rate["hi"]
    for row in kinds:
        assert row["tpot_s_ratio"]["value"] > 1.5
        assert row["tpot_s_p50"] >= STRUCTURED_GAP_S
    assert not [each for each in summary["verdict"]["reasons"] if each["check"] == "answer_length"]
    text = render(build_run_report([Analysis.of(result)])).decode()
    assert "## Structured answers" in text
    assert "tool call" in text


@pytest.mark.parametrize(
    ("text", "reason", "validity"),
    [
        ('{"label": "neutral", "score": 3}', "stop", Validity.VALID),
        ('{"label": "neutral", "score": 3.5}', "stop", Validity.NOT_IN_SCHEMA),
        ('{"label": "neutral"', "length", Validity.CUT),
        ("Sure! Here it is: {}", "stop", Validity.NOT_JSON),
        ("", "stop", Validity.NOT_JSON),
    ],
)
def test_servers_6_an_answer_is_valid_if_it_is_json_of_its_schema(text, reason, validity):
    assert Constraint(Kind.SCHEMA, "s", SCHEMA).check(text, reason) is validity


def test_servers_6_the_drawn_shares_are_those_of_the_load():
    share = StructuredShare(0.3, 0.25, seed=7)

    drawn = [share.of(f"p{number}") for number in range(4_000)]

    structured = [each for each in drawn if each is not None]
    assert len(structured) / 4_000 == pytest.approx(0.3, abs=0.03)
    assert sum(each.kind is Kind.TOOL for each in structured) / len(structured) == pytest.approx(0.25, abs=0.05)
    assert {each.name for each in structured} == {"sentiment", "person", "flags"}


def test_servers_6_an_api_without_a_field_for_the_structure_is_refused(server, schemas, tmp_path):
    with pytest.raises(UsageError, match="needs a schema, which API 'openai-completions' has no field for"):
        run(server[0], schemas, tmp_path, api="openai-completions")


@pytest.mark.parametrize("line", ["{", '{"name": "x"}', '{"name": "x", "schema": {"type": "nonsense"}}', "[1]"])
def test_servers_6_a_schema_file_with_a_wrong_line_is_refused_by_its_number(line, tmp_path):
    file = tmp_path / "schemas.jsonl"
    file.write_text(json.dumps({"name": "ok", "schema": SCHEMA}) + "\n" + line + "\n")

    with pytest.raises(UsageError, match=r"schemas\.jsonl:2: "):
        read_schemas(file)


def test_servers_6_compare_judges_the_validity_rate_in_points():
    options = CompareOptions(gated=("structured_validity",), shown=(), pairs=6)

    def verdict(rate_b):
        drift = (0.0, 0.002, -0.001, 0.001, -0.002, 0.0015)
        pairs = [
            Pair(
                SideRun("a", {"structured_validity": 0.97 + each}), SideRun("b", {"structured_validity": rate_b - each})
            )
            for each in drift
        ]
        return judge(pairs, options).exit_code

    assert verdict(0.97) == 0
    assert verdict(0.90) == 1


@pytest.mark.slow
def test_servers_6_a_run_without_structure_has_no_validity_rate(server, tmp_path):
    config = BenchConfig(concurrency=2, warmup=0, requests=4, input_tokens="8", output_tokens="8")

    summary = summarize(measure(config, Target(server[0]), tmp_path / "r"))

    assert summary["structured"] == []
    assert metric_value(summary, "structured_validity", is_open_loop=False) is None
