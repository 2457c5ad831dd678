"""Adapters of a running server: loaded, replaced and unloaded under load without a failed request; restored."""

import itertools
import json
import shutil
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

import pytest

from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.presets.catalog import find_adapter
from reference_server.router.batching import Batcher
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.served_adapters import AdapterRules, Adapters
from tests.support.models.adapters import merged, save_adapter
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import generate_alone, make_tiny_model, random_prompt, save_tiny_model
from tests.support.models.tiny_shards import tiny_options, warm_up
from tests.support.servers.launched_server import Server, serve
from tests.support.wire.wire_shard import served, socket_urls

CYCLES = 12
PROMPTS = ("Once upon a time", "The fox and the dog", "One day a girl went to the river and")
NAMES = (None, "exclaim", "live")


def post(server: Server, path: str, body: dict[str, object]) -> HTTPResponse:
    headers = {"Content-Type": "application/json"}
    response: HTTPResponse = urllib.request.urlopen(
        urllib.request.Request(server.url + path, json.dumps(body).encode(), headers), timeout=120
    )
    return response


def change(server: Server, verb: str, **body: object) -> None:
    """One of the adapter routes; raises HTTPError if it is refused."""
    with post(server, f"/v1/{verb}_lora_adapter", body):
        pass


def asked(name: str | None, prompt: str, max_new_tokens: int) -> dict[str, object]:
    return {
        "inputs": prompt,
        "parameters": {"max_new_tokens": max_new_tokens, **({} if name is None else {"adapter_id": name})},
    }


def generated(server: Server, name: str | None, prompt: str) -> str:
    text: str = server.post("/generate", asked(name, prompt, 24))["generated_text"]
    return text


@contextmanager
def users(server: Server, expected: dict[tuple[str | None, str], str]) -> Iterator[Counter[str]]:
    """Run six users until the block ends. The value counts outcomes: the text as alone, another text, an error."""
    over, counts = threading.Event(), Counter[str]()

    def use(number: int) -> None:
        for name, prompt in itertools.islice(itertools.cycle(expected), number, None):
            if over.is_set():
                return
            try:
                is_same = generated(server, name, prompt) == expected[name, prompt]
                counts["as alone" if is_same else "another text"] += 1
            except OSError as error:
                counts[f"failed: {error}"] += 1

    with ThreadPoolExecutor(6) as pool:
        using = [pool.submit(use, number) for number in range(6)]
        try:
            yield counts
        finally:
            over.set()
        for each in using:
            each.result()


def last_event(stream: HTTPResponse) -> dict[str, object]:
    event: dict[str, object] = json.loads([line for line in stream if line.startswith(b"data:")][-1][5:])
    return event


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [(), ("--transport", "grpc"), ("--num-shard", "2")], ids=["link", "grpc", "two ranks"]
)
def test_adapters_are_loaded_replaced_and_unloaded_under_load_without_a_failed_request(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("exclaim", "bullets"):
        source = find_adapter(f"preset:{name}")
        assert source is not None
        shutil.copytree(source, tmp_path / name)
    adapters = (
        "--lora-adapters",
        "exclaim=preset:exclaim",
        "--adapter-directory",
        str(tmp_path),
        "--adapter-memory-mib",
        "32",
    )
    guests = Counter[str]()
    with serve(*adapters, *flags, "--dtype", "float32") as server:
        change(server, "load", lora_name="live", lora_path="exclaim")
        expected = {(name, prompt): generated(server, name, prompt) for name in NAMES for prompt in PROMPTS}
        with users(server, expected) as counts, ThreadPoolExecutor(1) as operator:
            for number in range(CYCLES):
                # The same weights under a name in use, and a guest that is unloaded while its streams run.
                change(server, "load", lora_name="live", lora_path="exclaim", load_inplace=True)
                guest = f"guest-{number}"
                change(server, "load", lora_name=guest, lora_path="bullets")
                streams = [post(server, "/generate_stream", asked(guest, prompt, 60)) for prompt in PROMPTS]
                firsts = [stream.readline() for stream in streams]
                leaving = operator.submit(change, server, "unload", lora_name=guest)
                guests.update("ended" if last_event(stream).get("generated_text") else "cut" for stream in streams)
                leaving.result()
                assert all(first.startswith(b"data:") for first in firsts)
        with pytest.raises(urllib.error.HTTPError, match="422"):
            generated(server, "guest-0", PROMPTS[0])
        names = [each["id"] for each in server.get("/v1/models")["data"]]
    print(f"{CYCLES} loads, replacements and unloads: {dict(counts)}, streams of guests: {dict(guests)}")

    assert set(counts) == {"as alone"}
    assert counts["as alone"] >= 3 * CYCLES
    assert guests == {"ended": 3 * CYCLES}
    assert names[1:] == ["exclaim", "live"]
    assert expected["live", PROMPTS[0]] == expected["exclaim", PROMPTS[0]] != expected[None, PROMPTS[0]]


async def test_adapters_loaded_at_run_time_are_there_again_after_a_restart_of_the_shard(tmp_path: Path) -> None:
    base, model = save_tiny_model(tmp_path / "base", "llama"), make_tiny_model("llama")
    directory = save_adapter(tmp_path / "adapters" / "a", model, 3)
    save_adapter(tmp_path / "adapters" / "b", model, 2)
    options, urls, prompt = tiny_options(base, adapter_bytes=1 << 20), socket_urls(tmp_path), random_prompt(9)
    rules = AdapterRules("m", tmp_path / "adapters")
    first = LocalShard.load(options)
    async with served([first], urls) as group:
        adapters = Adapters((), rules, Batcher(group, Scheduler(SchedulerOptions(64, 256))))
        await adapters.load("a", "a")
        await adapters.load("b", "b")
        await adapters.unload("b")
    first.close()

    second = LocalShard.load(options)
    async with served([second], urls) as group:
        await warm_up(second)
        await group.info()
        await adapters.restore(group)
        restored = (await group.info()).adapters
        driver = ShardDriver(group)
        with adapters.use("a") as wire_id:
            [outcome] = await driver.run(driver.request(0, prompt, adapter_id=wire_id))
    second.close()

    assert (adapters.names, restored) == (("a",), ("a#1",))
    assert outcome.ids == generate_alone(merged(model, directory), prompt, 10)
