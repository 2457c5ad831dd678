"""The HTTP benchmark: its arithmetic, failed requests, and the floor."""

import json
import socketserver
import threading
from pathlib import Path

import pytest

from benchmarks.engine import over_http, roofline
from benchmarks.peers import servers
from benchmarks.peers.http_load import Dialect, FailedRequest, StreamTimes, WavePrompt, run_wave
from loadgen.selftest.reference_timing_server import timing_server
from reference_server.presets import catalog

FLOOR = roofline.Roofline(threads=1, read_gb_per_s=20.0, bf16_gflop_per_s=200.0, fp32_gflop_per_s=100.0)


@pytest.mark.parametrize(("name", "millions"), [("llama-125m", 109.6), ("bloom-560m", 558.9)])
def test_weights_of_a_step_are_layers_and_head(name: str, millions: float) -> None:
    preset = catalog.find(f"preset:{name}")
    assert preset is not None
    config = json.loads((preset.directory / "config.json").read_text())

    assert roofline.weights_a_step(config) / 1e6 == pytest.approx(millions, rel=0.01)


def test_the_floor_is_memory_at_one_row_and_products_at_many() -> None:
    assert FLOOR.decode_tokens_per_s(100_000_000, 1, 2) == pytest.approx(100)
    assert FLOOR.decode_tokens_per_s(100_000_000, 64, 2) == pytest.approx(1000)
    assert FLOOR.decode_tokens_per_s(100_000_000, 64, 4) == pytest.approx(500)


def test_a_wave_times_every_stream() -> None:
    with timing_server(0.02, 0.002) as url:
        streams = run_wave(url, "tgi", [WavePrompt("a", [1], 5), WavePrompt("b", [2], 5)])

    assert [stream.num_tokens for stream in streams] == [5, 5]
    assert all(0.02 <= stream.first_s < stream.last_s for stream in streams)


@pytest.mark.parametrize("dialect", ["tgi", "openai"])
def test_a_failed_request_raises(dialect: Dialect) -> None:
    class Overloaded(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.wfile.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Overloaded) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(FailedRequest, match="429"):
            run_wave(url, dialect, [WavePrompt("a", [1], 5)])
        server.shutdown()


def test_the_table_has_ratios_by_round_and_skipped_servers() -> None:
    stream = StreamTimes(first_s=0.1, last_s=0.73, num_tokens=64)
    ours = over_http.ServerRow("ours", 8, 3.0, rates=[100.0, 300.0], streams=[stream], outside_forward=[0.25])
    theirs = over_http.ServerRow("continuous", 8, 9.0, rates=[50.0, 100.0], streams=[stream])

    text = over_http.table("preset:llama-125m", [theirs, ours], {"vllm": "cannot be installed: no network"}, FLOOR)

    lines = text.splitlines()
    assert lines[3].split()[:2] == ["8", "ours"]
    assert "25%" in lines[3]
    assert lines[4].endswith("2.50 (2.00 - 3.00)")
    assert "100.0/100.0" in lines[3]
    assert "10.0/10.0" in lines[3]
    assert lines[5] == "  skipped: vllm: cannot be installed: no network"


def test_a_peer_that_cannot_be_installed_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "CACHE", tmp_path / "file")
    (tmp_path / "file").write_text("")

    with pytest.raises(servers.SkippedPeer, match="cannot be installed"):
        servers.environment("some", ["package"])


def test_llama_cpp_is_skipped_for_other_models_than_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.shutil, "which", lambda name: name)
    monkeypatch.setattr(servers, "saved", lambda model: tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')

    with pytest.raises(servers.SkippedPeer, match="a bloom cannot be converted to GGUF"):
        servers.llama_cpp("preset:bloom-560m", 1)


def test_without_its_program_llama_cpp_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(servers.SkippedPeer, match="`llama-server` is not on PATH"):
        servers.llama_cpp("preset:tiny-llama", 1)


def test_quantized_servers_are_compared_with_the_own_server_of_the_same_width() -> None:
    rows = [
        over_http.ServerRow("ours", 1, 1.0, rates=[100.0]),
        over_http.ServerRow("ours-int4", 1, 1.0, rates=[200.0]),
        over_http.ServerRow("llama-q4_0", 1, 1.0, rates=[160.0]),
    ]
    for row in rows:
        row.streams.append(StreamTimes(first_s=0.1, last_s=0.73, num_tokens=64))

    lines = over_http.table("preset:llama-125m", rows, {}, FLOOR).splitlines()

    assert [line.split()[1] for line in lines[3:]] == ["ours", "ours-int4", "llama-q4_0"]
    assert [
        line.endswith(ratio)
        for line, ratio in zip(lines[4:], ("0.50 (0.50 - 0.50)", "1.25 (1.25 - 1.25)"), strict=True)
    ]
