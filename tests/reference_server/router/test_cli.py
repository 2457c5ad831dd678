"""The command as a process, against a scripted model server on a unix socket."""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from reference_server.transport.service import serving
from tests.support.servers.serving import S, endless
from tests.support.wire.scripted_shard import ScriptedShard


@asynccontextmanager
async def router(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "reference_server.router.cli", "--tokenizer-name", "preset:tiny-llama", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "HOSTNAME": "127.0.0.1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def read_until(process: asyncio.subprocess.Process, word: str) -> str:
    """The log up to the line with `word`."""
    assert process.stdout is not None
    seen = ""
    while word not in seen:
        line = (await process.stdout.readline()).decode()
        assert line, f"the router ended; its log: {seen}"
        seen += line
    return seen


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def test_open_streams_finish_after_a_stop_signal(tmp_path: Path):
    url, port, second = f"unix://{tmp_path}/shard-0", free_port(), free_port()
    flags = ("--master-shard-uds-path", f"{tmp_path}/shard-0", "--port", str(port), "--prometheus-port", str(second))
    async with serving(ScriptedShard(endless), url, [url]), router(*flags) as process:
        log = await read_until(process, "Connected")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            info = (await client.get("/info")).json()
            config = (await client.get("/config")).json()
            metrics = await client.get(f"http://127.0.0.1:{second}/metrics")
            body = {"inputs": "hello", "parameters": {"max_new_tokens": 200}}
            async with client.stream("POST", "/generate_stream", json=body) as response:
                lines = response.aiter_lines()
                first = await anext(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line async for line in lines if line]

        assert await process.wait() == 0
    assert "Warming up model" in log
    assert (info["model_id"], info["max_total_tokens"]) == ("preset:tiny-llama", 2048)
    assert config["port"] == {"value": port, "source": "flag"}
    assert config["hostname"] == {"value": "127.0.0.1", "source": "environment"}
    assert config["max_total_tokens"]["source"] == "derived"
    assert "tgi_batch_max_total_tokens 4096" in metrics.text
    assert len([first, *rest]) == 200
    assert '"finish_reason":"length"' not in first


@pytest.mark.slow
async def test_a_chat_over_the_wire(tmp_path: Path):
    url, port = f"unix://{tmp_path}/shard-0", free_port()
    flags = ("--master-shard-uds-path", f"{tmp_path}/shard-0", "--port", str(port), "--json-output")
    async with serving(ScriptedShard(S), url, [url]), router(*flags) as process:
        log = await read_until(process, "Connected")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            answer = (await client.post("/v1/chat/completions", json=body)).json()

    assert log.startswith("{")
    assert answer["choices"][0]["message"]["content"] == " a b c d e"


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        pytest.param(["--no-such-flag"], 2, "unexpected argument '--no-such-flag'", marks=pytest.mark.slow),
        pytest.param(
            ["--check-invariants"],
            1,
            "Error: `--check-invariants true` is not served yet",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--validation-workers", "0"],
            1,
            "Error: Argument validation error: `validation_workers` must be > 0",
            marks=pytest.mark.slow,
        ),
        pytest.param(["--cors-allow-origin", "*"], 1, "`cors_allow_origin` cannot hold *", marks=pytest.mark.slow),
        (["--master-shard-uds-path", "/nowhere/socket"], 1, "Error: could not connect to the model server"),
    ],
    ids=["usage", "refused", "argument", "any_origin", "no_shard"],
)
async def test_a_failed_start_reports_its_reason(flags: Sequence[str], code: int, text: str):
    async with router("--port", "0", *flags) as process:
        _, errors = await process.communicate()

        assert (process.returncode, text in errors.decode()) == (code, True), errors


@pytest.mark.slow
async def test_a_taken_port_fails_before_connecting_to_the_model_server():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with router("--port", str(port)) as process:
            _, errors = await process.communicate()

            assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in errors.decode()


@pytest.mark.slow
async def test_a_signal_during_start_up_is_a_graceful_end(tmp_path: Path):
    async def hang(method: str) -> None:
        if method == "warmup":
            await asyncio.Event().wait()

    url = f"unix://{tmp_path}/shard-0"
    async with (
        serving(ScriptedShard(gate=hang), url, [url]),
        router("--master-shard-uds-path", f"{tmp_path}/shard-0", "--port", "0") as process,
    ):
        await read_until(process, "Warming up model")
        process.send_signal(signal.SIGINT)

        assert await process.wait() == 0
