"""The command, against a scripted model server on a socket, and as a process with a model server of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from reference_server.benchmark.cli import main, measure, parameters_of
from reference_server.configuration.config_benchmark import DEFAULT_BATCH_SIZES, BenchmarkConfig
from reference_server.configuration.settings import load
from reference_server.errors import NOT_WARMED_UP, ArgumentError, ShardConnectionError, ShardError
from reference_server.messages import ChooserParameters
from tests.support.samples.logs import kept_logging
from tests.support.wire.scripted_shard import INFO, ScriptedShard
from tests.support.wire.wire_shard import served, socket_urls

MODEL = "preset:tiny-llama"


def settings(*words: str, **environ: str) -> BenchmarkConfig:
    return load(BenchmarkConfig, ["--tokenizer-name", MODEL, *words], environ).config


def test_the_flags_and_variables_are_tgis():
    by_flag = settings("-b", "8", "-b", "1", "-s", "5", "-d", "3", "-r", "2", "-w", "0", "-m", "/run/shard-0")
    by_variable = settings(
        SEQUENCE_LENGTH="5", DECODE_LENGTH="3", RUNS="2", WARMUPS="0", MASTER_SHARD_UDS_PATH="/run/shard-0"
    )

    assert by_flag == by_variable.model_copy(update={"batch_size": (1, 8)})
    assert by_variable.batch_size == DEFAULT_BATCH_SIZES == (1, 2, 4, 8, 16, 32)


def test_several_batch_sizes_may_share_a_flag():
    assert settings("--batch-size", "4,2", "-b", "1").batch_size == (1, 2, 4)


def test_parameters_that_are_not_given_are_off():
    assert parameters_of(settings()) == ChooserParameters()
    assert parameters_of(settings("--top-k", "5", "--do-sample")) == ChooserParameters(top_k=5, do_sample=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the flag '--tokenizer-name' is required"),
        (["-t", "x", "--decode-length", "1"], "invalid value '1' for '--decode-length'"),
        (["-t", "x", "-b", "0"], "invalid value '0' for '--batch-size'"),
    ],
)
def test_wrong_usage_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_flags_of_a_model_server_need_one(capsys: pytest.CaptureFixture[str]):
    with kept_logging():
        assert main(["-t", MODEL, "--", "--dtype", "bfloat16"]) == 1

    assert "`--dtype` after `--` is a flag of the model server: add `--serve`" in capsys.readouterr().err


async def test_every_batch_size_is_measured_on_the_shard_at_the_socket(tmp_path: Path):
    shard, urls = ScriptedShard(), socket_urls(tmp_path)
    config = settings("-m", urls[0], "-b", "1", "-b", "3", "--runs", "2", "--warmups", "1", "-d", "4")

    async with served([shard], urls):
        result = await measure(config, (), {})

    sizes = [len(arguments[0].requests) for method, arguments in shard.calls if method == "prefill"]
    assert sizes == [1, 1, 1, 1, 3, 3, 3]
    assert {size: len(batches) for size, batches in result.batches.items()} == {1: 2, 3: 2}
    assert (result.settings["decode_length"], result.shard["block_size"], result.shard["shards"]) == (4, 16, 1)


async def test_a_shard_that_no_router_has_warmed_up_gets_room_for_the_largest_batch(tmp_path: Path):
    class ColdShard(ScriptedShard):
        is_warm = False

        async def warmup(self, request):
            self.is_warm = True
            return await super().warmup(request)

        async def prefill(self, batch, cached=None):
            if not self.is_warm:
                raise ShardError(f"{NOT_WARMED_UP}: the K/V cache has no size yet")
            return await super().prefill(batch, cached)

    shard, urls = ColdShard(), socket_urls(tmp_path)
    config = settings("-m", urls[0], "-b", "3", "--runs", "1", "-s", "5", "-d", "4")

    async with served([shard], urls):
        await measure(config, (), {})

    [request] = [arguments[0] for method, arguments in shard.calls if method == "warmup"]
    assert (request.max_prefill_tokens, request.max_input_tokens, request.max_total_tokens) == (15, 5, 9)


async def test_a_prefix_cache_is_not_overwritten_unless_asked(tmp_path: Path):
    shard, urls = ScriptedShard(info=replace(INFO, use_prefix_caching=True)), socket_urls(tmp_path)
    words = ("-m", urls[0], "-b", "1", "--runs", "1")

    async with served([shard], urls):
        with pytest.raises(ArgumentError, match="has a prefix cache"):
            await measure(settings(*words), (), {})
        await measure(settings(*words, "--overwrite-prefix-cache"), (), {})


async def test_a_socket_without_a_server_is_refused_with_the_remedies(tmp_path: Path):
    with pytest.raises(ShardConnectionError, match=r"start `text-generation-launcher` or .* or add `--serve`"):
        await measure(settings("-m", str(tmp_path / "none-0")), (), {})


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "reference_server.benchmark.cli", "-t", MODEL, "--serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(cwd)},
    )


@pytest.mark.slow
def test_a_served_preset_has_tables_json_and_a_page(tmp_path: Path):
    done = start(
        *("-b", "1", "-b", "2", "--runs", "2", "--json-file", "s.json", "--html-file", "p.html"),
        *("--", "--cpu-memory-gib", "0.05"),
        cwd=tmp_path,
    )
    out, err = done.communicate(timeout=120)

    assert done.returncode == 0, err
    assert "| Decode (token) |     2 |" in out
    content = json.loads((tmp_path / "s.json").read_text())
    assert [each["decode_steps"] for each in content["batches"]] == [7, 7, 7, 7]
    page = (tmp_path / "p.html").read_text()
    assert "Benchmark of preset:tiny-llama" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert list(tmp_path.glob("text-generation-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_benchmark_and_its_model_server(tmp_path: Path, number: signal.Signals, code: int):
    process = start("-b", "1", "--runs", "1000000", "--", "--cpu-memory-gib", "0.05", cwd=tmp_path)
    assert process.stderr is not None
    while "warming up" not in (line := process.stderr.readline()):
        assert line, "the benchmark ended"
    time.sleep(0.5)
    children = _children(process.pid)

    process.send_signal(number)
    out, err = process.communicate(timeout=60)

    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err
    assert children
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.glob("text-generation-*")) == []


def _children(pid: int) -> list[int]:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(word) for word in words]
