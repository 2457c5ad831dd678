import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reference_server.configuration.config import RankConfig, ShardConfig
from reference_server.errors import ArgumentError, ShardConnectionError, ShardError
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server import cli
from reference_server.model_server.cli import engine_options, group_urls, main
from reference_server.model_server.options import EngineOptions, RopeOverride
from reference_server.transport.client import connect
from reference_server.transport.grpc_channel import GrpcChannel
from reference_server.transport.remote_shard import RemoteShard
from tests.support.models.tiny_models import save_tiny_model
from tests.support.samples.logs import kept_logging
from tests.support.servers.hub import Fault, fake_hub

pytestmark = pytest.mark.usefixtures("logging_as_before")

ROOT = Path(__file__).parents[3]

# `serve`'s main loop over a scripted shard, whose next Health raises argv[1], e.g. RuntimeError.
SCRIPTED_PROGRAM = """
import asyncio, builtins, sys

from reference_server.model_server.cli import serve_until_stopped
from tests.support.wire.scripted_shard import ScriptedShard

shard = ScriptedShard()
shard.failures["health"] = getattr(builtins, sys.argv[1])("device lost")
url = f"unix://{sys.argv[2]}"
sys.exit(asyncio.run(serve_until_stopped(shard, url, [url])))
"""


@pytest.fixture
def logging_as_before():
    with kept_logging():
        yield


def start(*command: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ},
    )


def serve(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    return start("-m", "reference_server.model_server.cli", "serve", *arguments, **environ)


def test_loaded_objects_are_excluded_from_later_garbage_collections(monkeypatch):
    frozen = []
    monkeypatch.setattr(cli, "_load", lambda *_: SimpleNamespace(thread=None))
    monkeypatch.setattr(cli, "serve_until_stopped", lambda *_: None)
    monkeypatch.setattr(cli.uvloop, "run", lambda _: frozen.append(gc.get_freeze_count()) or 0)
    monkeypatch.setattr(cli.logging, "shutdown", lambda: None)
    monkeypatch.setattr(cli.os, "_exit", sys.exit)
    gc.unfreeze()

    try:
        with pytest.raises(SystemExit):
            cli.serve(ShardConfig(model_id="model"), RankConfig())
    finally:
        gc.unfreeze()

    assert frozen[0] > 10_000


async def reach(path: Path, process: subprocess.Popen[str]) -> RemoteShard:
    """The shard at a socket, once it is there."""
    while process.poll() is None:
        try:
            return RemoteShard(await GrpcChannel.open(str(path)))
        except ShardConnectionError:
            await asyncio.sleep(0.05)
    raise AssertionError(process.communicate())


def request(prompt: str, prompt_len: int, max_new_tokens: int, **placement: object) -> Request:
    return Request(
        id=1,
        chunks=(prompt,),
        truncate=prompt_len,
        parameters=ChooserParameters(),
        stopping=StoppingParameters(max_new_tokens),
        **placement,
    )


@pytest.mark.slow
async def test_serve_loads_answers_logs_records_and_exits_on_sigterm(tmp_path):
    process = serve("preset:tiny-llama", "--uds-path", str(tmp_path / "shard"), "--json-output", CPU_MEMORY_GIB="0.05")
    shard = await reach(tmp_path / "shard-0", process)
    await shard.close()
    group = await connect(str(tmp_path / "shard-0"))
    try:
        info = await group.info()
        warmup = await group.warmup(WarmupRequest(Batch(0, (request("_test " * 64, 64, 1),)), 64))
        result = await group.prefill(Batch(1, (request("Once upon a time", 16, 4, blocks=(1, 2)),)))
    finally:
        await group.close()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    assert (info.device_type, info.block_size) == ("cpu", 16)
    assert warmup.max_supported_total_tokens > 0
    assert len(result.generations) == 1
    records = [json.loads(line)["record"] for line in out.splitlines()]
    assert f"Server started at unix://{tmp_path}/shard-0" in [record["message"] for record in records]
    assert not (tmp_path / "shard-0").exists()


@pytest.mark.parametrize(("error", "code"), [("RuntimeError", 1), ("ValueError", 0)])
async def test_model_server_M20_a_runtime_error_is_returned_and_ends_the_process(tmp_path, error, code):
    process = start("-c", SCRIPTED_PROGRAM, error, str(tmp_path / "shard"))
    shard = await reach(tmp_path / "shard", process)

    with pytest.raises(ShardError, match=r"^device lost$"):
        await shard.health()
    if code == 0:
        await shard.health()
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    await shard.close()

    assert process.returncode == code


def test_a_model_without_weights_cannot_be_loaded(tmp_path, capfd):
    save_tiny_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()

    code = main(["serve", str(tmp_path), "--uds-path", str(tmp_path / "shard"), "--json-output"])

    out, err = capfd.readouterr()
    [error] = [
        record for line in out.splitlines() if (record := json.loads(line)["record"])["level"]["name"] == "ERROR"
    ]
    assert code == 1
    assert "no weights found" in error["message"]
    assert f"Error: {error['message']}" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["serve", "preset:tiny-llama", "--quantize", "exl2"],
            "`--quantize exl2` needs a checkpoint that is quantized",
        ),
        (
            ["serve", "preset:tiny-llama", "--quantize", "gptq"],
            "`--quantize gptq` needs a checkpoint that is quantized",
        ),
        (
            ["serve", "preset:tiny-llama", "--kv-cache-dtype", "fp8_e5m2", "--attention", "flash"],
            "`--attention flash` cannot be served with `--kv-cache-dtype fp8_e5m2`",
        ),
        (["serve", "preset:tiny-llama", "--logger-level", "loud"], "log level 'loud'"),
        (["serve", "preset:tiny-llama", "--sharded"], "RANK"),
        (["serve", "preset:tiny-llama", "--listen", "nowhere"], "'nowhere' is not host:port"),
        (["download-weights", "preset:none"], "preset"),
    ],
)
def test_unsupported_settings_are_refused_by_name(argv, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    assert main(argv) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["bake"], 2), (["--help"], 0)])
def test_an_unknown_command_prints_the_usage(argv, code, capsys):
    assert main(argv) == code

    printed = capsys.readouterr()
    assert "serve, download-weights, quantize" in printed.out + printed.err


def test_model_server_M32_local_safetensors_need_no_download(tmp_path):
    (tmp_path / "model.safetensors").touch()

    assert main(["download-weights", str(tmp_path), "--logger-level", "error"]) == 0


def download(hub, tmp_path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `download-weights` in its own process with the test hub."""
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    process = start("-m", "reference_server.model_server.cli", "download-weights", *arguments, **places | environ)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def test_a_private_model_is_downloaded_and_its_token_is_not_logged(tmp_path):
    token = "hf_private_1234567890"
    with fake_hub() as hub:
        commit = hub.add("some/private", {"model.safetensors": b"weights"}, token=token, revision="v1")
        flags = (
            "--revision",
            "v1",
            "--logger-level",
            "trace,=trace",
            "--huggingface-hub-cache",
            str(tmp_path / "cache"),
        )
        done = download(hub, tmp_path, "some/private", *flags, HF_API_TOKEN=token, HF_DEBUG="1")

    assert done.returncode == 0, done.stderr
    assert "Download: [1/1]" in done.stdout
    assert "httpcore" in done.stdout
    assert token not in done.stdout + done.stderr
    snapshot = tmp_path / "cache" / "models--some--private" / "snapshots" / commit
    assert (snapshot / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.slow
def test_a_wrong_token_is_an_error_without_the_token(tmp_path):
    with fake_hub() as hub:
        hub.add("some/private", {"model.safetensors": b"weights"}, token="hf_right")
        done = download(hub, tmp_path, "some/private", "--json-output", HF_TOKEN="hf_wrong")

    assert done.returncode == 1
    assert "may not be read with the token of HF_TOKEN" in done.stderr
    assert "ERROR" in [json.loads(line)["record"]["level"]["name"] for line in done.stdout.splitlines()]
    assert "hf_wrong" not in done.stdout + done.stderr


@pytest.mark.slow
def test_reliability_F34_a_killed_download_resumes(tmp_path):
    """Parts of 10 MB are written; an incomplete part is downloaded again."""
    piece = 10 * 1024 * 1024
    content = os.urandom(2 * piece + 1000)
    with fake_hub() as hub:
        hub.add("some/model", {"model.safetensors": content})
        hub.faults["model.safetensors"] = [Fault(stall_after=2 * piece + 500)]
        places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        first = start("-m", "reference_server.model_server.cli", "download-weights", "some/model", **places)
        while sum(path.stat().st_size for path in tmp_path.rglob("*.incomplete")) < 2 * piece:
            assert first.poll() is None, first.communicate()
            time.sleep(0.05)
        first.kill()
        first.communicate()

        done = download(hub, tmp_path, "some/model", HF_HOME=str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert hub.asked("GET", "model.safetensors") == [None, f"bytes={2 * piece}-"]
    assert next(tmp_path.rglob("model.safetensors")).read_bytes() == content


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ((), ["model.safetensors", "pytorch_model.bin"]),
        (("--no-auto-convert",), ["pytorch_model.bin"]),
        (("--extension", ".bin"), ["pytorch_model.bin"]),
        (("--trust-remote-code",), ["model.safetensors", "pytorch_model.bin"]),
    ],
)
def test_a_local_pickle_is_converted_by_default(tmp_path, capfd, flags, names):
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")

    assert main(["download-weights", str(tmp_path), *flags]) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert ("Nothing but tensors is read from pickles" in capfd.readouterr().out) == (flags == ())


@pytest.mark.slow
def test_model_server_M32_offline_with_nothing_cached_fails(tmp_path):
    with fake_hub() as hub:
        done = download(hub, tmp_path, "some/model", HF_HUB_OFFLINE="1")

    assert done.returncode == 1
    assert "model 'some/model' at revision main is not in the cache" in done.stderr
    assert hub.requests == []


def test_options_follow_the_settings():
    settings = {
        "revision": "v1",
        "dtype": "float32",
        "load_format": "dummy",
        "cuda_memory_fraction": 0.5,
        "wiggle_room": 0.8,
        "cpu_memory_gib": 2.0,
        "prefill_chunking": False,
        "prefix_caching": True,
        "enable_prefill_logprobs": True,
        "attention": "torch",
        "max_input_tokens": 100,
        "trust_remote_code": True,
        "rope_factor": 2.0,
        "disable_custom_kernels": True,
        "compiled_walk": False,
        "compute_threads": 2,
        "watermark_gamma": 0.25,
        "watermark_delta": 1.5,
    }

    assert engine_options(ShardConfig(model_id="m")) == EngineOptions("m")
    assert engine_options(ShardConfig(model_id="m", huggingface_hub_cache=Path("/c"))) == EngineOptions(
        "m", hub_cache=Path("/c")
    )
    assert engine_options(ShardConfig(model_id="m", **settings)) == EngineOptions(
        model_id="m",
        revision="v1",
        dtype="float32",
        load_format="dummy",
        memory_fraction=0.5,
        wiggle_room=0.8,
        cpu_memory_gib=2.0,
        prefill_chunking=False,
        prefix_caching=True,
        request_logprobs=True,
        attention="torch",
        max_input_tokens=100,
        trust_remote_code=True,
        rope=RopeOverride("linear", 2.0),
        fuse=False,
        compiled_walk=False,
        compute_threads=2,
        watermark_gamma=0.25,
        watermark_delta=1.5,
    )


def test_each_rank_has_its_own_socket():
    config = ShardConfig(model_id="m", uds_path="/run/tgi")

    assert group_urls(config, RankConfig()) == ["unix:///run/tgi-0"]
    assert group_urls(config, RankConfig(rank=1, world_size=2)) == ["unix:///run/tgi-0", "unix:///run/tgi-1"]


def test_ranks_over_tcp_have_the_addresses_of_shard_addr():
    alone = ShardConfig(model_id="m", listen=":8001")
    group = ShardConfig(model_id="m", listen="10.0.0.2:8001", shard_addr=("10.0.0.1:8001", "10.0.0.2:8001"))

    assert group_urls(alone, RankConfig()) == ["tcp://127.0.0.1:8001"]
    assert group_urls(group, RankConfig(rank=1, world_size=2)) == ["tcp://10.0.0.1:8001", "tcp://10.0.0.2:8001"]
    with pytest.raises(ArgumentError, match="names 2 shards but WORLD_SIZE is 3"):
        group_urls(group, RankConfig(rank=1, world_size=3))


def test_download_weights_does_not_import_torch():
    program = (
        "import sys; from reference_server.model_server.cli import main; "
        "code = main(['download-weights', 'preset:tiny-llama']); sys.exit(3 if 'torch' in sys.modules else code)"
    )

    process = start("-c", program)
    process.communicate(timeout=60)

    assert process.returncode == 0
