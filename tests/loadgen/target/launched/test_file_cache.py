"""Weight files in the page cache, and the times of a launch."""

import json
import os
import sys

import pytest

from loadgen.cli import main
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.gate.sides import RunningServer
from loadgen.runner import measure
from loadgen.target.launched.file_cache import FileCache, cached_bytes, weight_files
from loadgen.target.open_target import open_target
from reports.gate.saved_comparison import COMPARISON_FILE
from reports.metrics.summary import Analysis, metric_value
from reports.pages.run_page import build_run_report
from reports.renderers.markdown import render

SIZE = 300_000
SERVE = f"{sys.executable} -m tests.support.servers.serve_stream"
LOAD = {"duration": 0.5, "warmup": 0, "input_tokens": "8", "output_tokens": "2", "concurrency": 2}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        os.fsync(file.fileno())
    return folder


def test_servers_6_warm_reads_every_page_and_cold_drops_them(model):
    cold, warm = (FileCache.of(state, (), ["serve", f"--model={model}"]) for state in ("cold", "warm"))

    assert warm.prepare() == {"state": "warm", "files": 1, "bytes": SIZE, "cached_share": 1.0}
    assert cached_bytes(model / "model.safetensors") == SIZE
    found = cold.prepare()
    if found["cached_share"] == 1.0:
        pytest.skip("the file system keeps its pages, as tmpfs does")
    assert found["cached_share"] < 0.1


def test_servers_6_weight_files_are_found_in_folders_and_words(model):
    weights = model / "model.safetensors"

    assert weight_files(["serve", str(model), str(weights), sys.executable]) == (weights,)
    assert FileCache.of("natural", (), []).prepare() is None
    with pytest.raises(UsageError, match="names no weight files; give --model-files"):
        FileCache.of("cold", (), ["serve", "--model-id", "preset:tiny-llama"])
    with pytest.raises(UsageError, match="no such file or folder"):
        FileCache.of("cold", (str(model / "missing"),), [])
    with pytest.raises(ValueError, match="already runs"):
        BenchConfig(url="http://a:1", file_cache="cold")


def test_servers_6_the_file_cache_of_a_server_that_already_runs_is_refused(tmp_path):
    load = BenchConfig(file_cache="cold")

    with pytest.raises(UsageError, match="already runs and is not launched"):
        RunningServer("http://a:1").open(load, tmp_path / "log").__enter__()


@pytest.mark.parametrize("slow_s", [0.0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_servers_6_the_start_up_of_a_launched_server_is_a_metric_of_its_run(model, tmp_path, slow_s):
    server = f"{SERVE} --slow-start {slow_s}"
    config = BenchConfig(server=server, file_cache="warm", model_files=str(model), **LOAD)

    with open_target(config, tmp_path / "server.log") as target:
        result = measure(config, target, tmp_path / "r")

    analysis = Analysis.of(result)
    ready_s, first_s = (
        metric_value(analysis.summary, f"startup_{name}_s", is_open_loop=False) for name in ("ready", "first_token")
    )
    assert slow_s < ready_s <= first_s < 60
    text = render(build_run_report([analysis])).decode()
    assert f"ready after {ready_s:.2f} s, first token after {first_s:.2f} s; warm file cache: 100% of 0.3 MiB" in text


@pytest.mark.slow
def test_servers_6_compare_judges_a_start_that_became_slower(model, tmp_path):
    words = ["compare", "--server-a", SERVE, "--server-b", f"{SERVE} --slow-start 10", "--out", str(tmp_path / "c")]
    words += ["--gate", "startup_first_token_s"]
    words += ["--file-cache", "warm", "--model-files", str(model), "--duration", "1s", "--warmup", "0"]
    words += ["--input-tokens", "8", "--output-tokens", "2", "--concurrency", "2"]

    main([*words, "--pairs", "4"])

    found = json.loads((tmp_path / "c" / COMPARISON_FILE).read_text())
    start = found["metrics"]["startup_first_token_s"]
    assert start["decision"] == "regression", found
    assert 5 < start["b"] - start["a"] < 60
