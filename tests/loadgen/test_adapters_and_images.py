"""Adapters and images of a load: in request bodies, in records and in the report, against a scripted server."""

import base64
import json
import struct
import zlib
from collections import Counter

import pytest
from pydantic import ValidationError

from loadgen.config.bench_config import BenchConfig
from loadgen.dialects.dialect import Sampling
from loadgen.dialects.registry import open_dialect
from loadgen.errors import UsageError
from loadgen.runner import measure
from loadgen.target.target import Target
from loadgen.workloads.adapter_mix import AdapterMix, zipf_shares
from loadgen.workloads.prompts.images import ImageMix
from loadgen.workloads.prompts.planned_cache import CacheFacts, planned
from loadgen.workloads.prompts.prompt import Prompt
from loadgen.workloads.prompts.synthetic_image import SyntheticImage, png
from reports.metrics.summary import Analysis, summarize
from reports.pages.sections.adapters import adapters_table
from reports.pages.sections.request_tables import lengths_table
from tests.support.measured_requests import measured
from tests.support.servers.stream_server import Script, ServerState, stream_server

LOAD = {
    "input_tokens": "8",
    "output_tokens": "4",
    "warmup": 0,
    "concurrency": 4,
    "requests": 40,
    "api": "tgi",
    "engine": "tgi",
}


def body_of(api, prompt):
    return json.loads(open_dialect(api, Sampling(model="base")).body(prompt))


def test_shares_of_adapters_are_those_given_and_the_rest_is_the_base_model():
    mix = AdapterMix((("a", 0.5), ("b", 0.2)), seed=3)

    counts = Counter(mix.of(Prompt(f"p{number}")) for number in range(20_000))

    assert counts["a"] / 20_000 == pytest.approx(0.5, abs=0.01)
    assert counts["b"] / 20_000 == pytest.approx(0.2, abs=0.01)
    assert counts[None] / 20_000 == pytest.approx(0.3, abs=0.01)


def test_a_zipf_law_uses_the_first_name_most_and_no_base_model():
    mix = AdapterMix(zipf_shares([f"a{rank}" for rank in range(1, 17)], 1.1))

    counts = Counter(mix.of(Prompt(f"p{number}")) for number in range(20_000))

    total = sum(rank**-1.1 for rank in range(1, 17))
    assert None not in counts
    for rank in (1, 2, 8):
        assert counts[f"a{rank}"] / 20_000 == pytest.approx(rank**-1.1 / total, abs=0.01)


def test_every_turn_of_a_session_has_its_adapter():
    mix = AdapterMix((("a", 0.5), ("b", 0.5)))

    turns = {mix.of(Prompt(f"s7-{turn}", session_id="s7", turn=turn)) for turn in range(20)}

    assert len(turns) == 1


@pytest.mark.parametrize(
    ("api", "expected"),
    [
        ("tgi", lambda body: body["parameters"]["adapter_id"]),
        ("openai-chat", lambda body: body["model"]),
        ("openai-completions", lambda body: body["model"]),
        ("ollama-chat", lambda body: body["model"]),
    ],
)
def test_the_adapter_is_in_the_field_of_each_api(api, expected):
    assert expected(body_of(api, Prompt("p", text="hi", output_tokens=3, adapter="support"))) == "support"
    if api != "tgi":
        assert expected(body_of(api, Prompt("p", text="hi", output_tokens=3))) == "base"
    else:
        assert "adapter_id" not in body_of(api, Prompt("p", text="hi"))["parameters"]


def test_a_prefix_is_planned_once_for_each_adapter():
    prompts = [
        Prompt(str(number), input_tokens=64, parts=((32, "shared"), (32, str(number))), adapter=adapter)
        for number, adapter in enumerate((None, None, "a", "a"))
    ]

    found = [prompt.planned_cached_tokens for prompt in planned(prompts, CacheFacts())]

    assert found[0] == found[2] == 0
    assert found[1] == found[3] >= 32


def failing_adapter(body):
    name = body.get("parameters", {}).get("adapter_id")
    return Script(first_s=0.05 if name == "slow" else 0.01, gap_s=0.002, status=422 if name == "unknown" else 200)


def test_the_report_has_a_row_for_each_adapter_with_its_failures_and_latencies(tmp_path):
    config = BenchConfig(**LOAD | {"requests": 120}, adapter=("slow:0.4", "unknown:0.2"))
    with stream_server(ServerState(script=failing_adapter)) as (url, _):
        result = measure(config, Target(url), tmp_path / "r")

    rows = {row["adapter"]: row for row in summarize(result)["adapters"]}
    sent = Counter(record.adapter for record in measured(result))
    assert {name: row["requests"] for name, row in rows.items()} == dict(sent)
    assert (rows[None]["failed"], rows["slow"]["failed"]) == (0, 0)
    assert rows["unknown"]["failed"] == sent["unknown"] > 0
    assert rows["slow"]["ttft_s_p50"] > rows[None]["ttft_s_p50"] + 0.02
    assert rows["slow"]["output_tokens"] == 4 * sent["slow"]
    # Two-sided 95 % intervals of a 95th percentile need 72 requests.
    assert rows["slow"]["ttft_s_p95"] is None
    table = adapters_table(summarize(result)["adapters"])
    assert table["adapter"].tolist()[0] == "base model"
    assert table["requests"].sum() == len(measured(result))


@pytest.mark.slow
def test_a_run_without_adapters_and_images_has_no_such_rows(tmp_path):
    with stream_server(ServerState(script=failing_adapter)) as (url, _):
        result = measure(BenchConfig(**LOAD), Target(url), tmp_path / "r")

    assert summarize(result)["adapters"] == []
    assert "images per request" not in lengths_table([Analysis.of(result)])["tokens"].tolist()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adapter": ("a:0.7", "b:0.5")}, "sum is 1.2"),
        ({"adapter": ("a:0.2", "a:0.2")}, "one name twice"),
        ({"adapter": ("a:0.2",), "adapters": "b"}, "exclude each other"),
        ({"adapter_zipf": 1.1}, "--adapters NAMES"),
        ({"adapter": ("a",)}, "NAME:SHARE"),
        ({"image_size": "64x64"}, "--images COUNT"),
        ({"images": 1, "image_size": "64"}, "WxH"),
        ({"images": 1, "workload": "multi_turn"}, "one turn"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields, words):
    with pytest.raises(ValidationError, match=words):
        BenchConfig(**fields)


def decoded(data):
    """Width, height and the pixels of a PNG without filters."""
    width, height = struct.unpack(">II", data[16:24])
    length = struct.unpack(">I", data[33:37])[0]
    return width, height, zlib.decompress(data[41 : 41 + length])


@pytest.mark.parametrize(("width", "height"), [(1, 1), (16, 16), (33, 20), (640, 480)])
def test_a_png_has_its_size_and_its_own_content(width, height):
    data = png("key", width, height)

    found = decoded(data)

    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert found[:2] == (width, height)
    assert len(found[2]) == height * (3 * width + 1)
    assert png("key", width, height) == data
    assert png("other", width, height) != data


def test_a_png_is_read_by_an_image_library():
    image = pytest.importorskip("PIL.Image")
    import io

    picture = image.open(io.BytesIO(png("key", 33, 20)))
    picture.load()

    assert (picture.size, picture.mode) == ((33, 20), "RGB")


def test_images_are_new_for_each_request_or_shared():
    new = {image.base64 for number in range(20) for image in ImageMix(2, 32, 32).of(Prompt(str(number)))}
    shared = {image.base64 for number in range(40) for image in ImageMix(1, 32, 32, shared=1.0).of(Prompt(str(number)))}
    half = [ImageMix(1, 8, 8, shared=0.5).of(Prompt(str(number)))[0].key for number in range(4_000)]

    assert len(new) == 40
    assert len(shared) == 4
    assert sum("shared" in key for key in half) / 4_000 == pytest.approx(0.5, abs=0.03)


def test_images_are_markdown_natively_and_parts_on_the_chat_route():
    prompt = Prompt("p", text="Describe.", output_tokens=3, images=(SyntheticImage("k", 8, 8),))
    url = "data:image/png;base64," + base64.b64encode(png("k", 8, 8)).decode()

    assert body_of("tgi", prompt)["inputs"] == f"![]({url})Describe."
    [message] = body_of("openai-chat", prompt)["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Describe."},
    ]


def test_images_of_a_dataset_are_counted_too():
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, {"type": "text", "text": "x"}]

    assert Prompt("p", messages=({"role": "user", "content": parts},)).num_images == 1
    assert Prompt("p", text="![](data:image/png;base64,AA==) and ![](data:image/png;base64,AA==)").num_images == 2
    assert Prompt("p", text="plain").num_images == 0


def test_a_run_with_images_reports_them_and_does_not_doubt_its_prompt_lengths(tmp_path):
    with stream_server(ServerState(script=failing_adapter)) as (url, _):
        result = measure(BenchConfig(**LOAD, images=3, image_size="16x16"), Target(url), tmp_path / "r")

    summary = summarize(result)
    assert {record.images for record in measured(result)} == {3}
    assert summary["workload"]["lengths"]["images"]["mean"] == 3
    assert summary["client"]["input_tokens_excess"] is None
    assert {record.planned_cached_tokens for record in measured(result)} == {None}
    table = lengths_table([Analysis.of(result)]).set_index("tokens")
    assert table.loc["images per request", "mean"] == 3


def test_images_need_an_api_that_has_them(tmp_path):
    config = BenchConfig(**LOAD | {"api": "openai-completions"}, images=1)
    with (
        stream_server(ServerState(script=failing_adapter)) as (url, _),
        pytest.raises(UsageError, match="give --api openai-chat or tgi"),
    ):
        measure(config, Target(url), tmp_path / "r")


@pytest.mark.slow
def test_loads_with_other_adapters_or_images_have_other_digests(tmp_path):
    hashes = set()
    with stream_server(ServerState(script=failing_adapter)) as (url, _):
        for number, fields in enumerate(({}, {"adapter": ("a:0.5",)}, {"images": 1})):
            config = BenchConfig(**LOAD | {"requests": 4, "concurrency": 1}, **fields)
            hashes.add(measure(config, Target(url), tmp_path / str(number)).manifest.workload_hash)

    assert len(hashes) == 3


@pytest.mark.parametrize(("engine", "is_refused"), [("own", True), ("vllm", True), ("tgi", False)])
def test_an_adapter_that_a_server_does_not_list_is_refused(tmp_path, engine, is_refused):
    """A real TGI serves adapters that it does not list."""
    fields = LOAD | {"requests": 4, "api": "openai-chat", "engine": engine, "model": "scripted"}
    with stream_server(ServerState(script=failing_adapter)) as (url, _):
        config = BenchConfig(**fields, adapters="a,b")
        if is_refused:
            with pytest.raises(UsageError, match="no adapter 'a'; /v1/models lists"):
                measure(config, Target(url), tmp_path / "r")
        else:
            assert {each.adapter for each in measured(measure(config, Target(url), tmp_path / "r"))} <= {"a", "b"}
