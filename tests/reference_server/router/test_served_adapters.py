"""Adapters in the router: names in requests, loading and unloading, and requests that a change does not affect."""

import asyncio
from pathlib import Path

import pytest

from reference_server.errors import ShardError
from reference_server.router.app import TransportOptions
from reference_server.router.served_adapters import AdapterRules
from tests.support.servers.serving import Served, serve
from tests.support.wire.scripted_shard import ScriptedShard


async def load(served: Served, name: str, path: object, **more: object) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": str(path), **more}
    response = await served.client.post("/v1/load_lora_adapter", json=body)
    return response.status_code, response.text


async def unload(served: Served, name: str) -> tuple[int, str]:
    response = await served.client.post("/v1/unload_lora_adapter", json={"lora_name": name})
    return response.status_code, response.text


def rules(directory: Path, **changes: object) -> AdapterRules:
    return AdapterRules("m", directory, **changes)  # type: ignore[arg-type]


async def test_a_request_selects_an_adapter_by_name() -> None:
    async with serve(adapters=("poet", "clerk")) as served:
        await served.generate(adapter_id="clerk", max_new_tokens=1)
        for model in ("poet", "m", "tgi", None):
            body = {"prompt": "a", "model": model, "max_tokens": 1}
            assert (await served.client.post("/v1/completions", json=body)).status_code == 200
        sent = [request.adapter_id for request in served.requests]

    assert sent == ["clerk", "poet", None, None, None]


async def test_an_unknown_adapter_is_refused_with_the_list() -> None:
    async with serve(adapters=("poet", "clerk")) as served:
        native = await served.generate(adapter_id="cook")
        chat = {"messages": [{"role": "user", "content": "a"}], "model": "cook"}
        openai = await served.client.post("/v1/chat/completions", json=chat)
        sent = served.requests

    expected = "Input validation error: no adapter 'cook' is loaded; there are poet, clerk"
    assert [(each.status_code, each.json()["error"]) for each in (native, openai)] == [(422, expected)] * 2
    assert sent == []


async def test_with_the_fallback_an_unknown_adapter_selects_the_base_model() -> None:
    async with serve(adapters=("poet",), adapter_rules=AdapterRules("m", falls_back=True)) as served:
        response = await served.generate(adapter_id="cook", max_new_tokens=1)
        (request,) = served.requests

    assert (response.status_code, request.adapter_id) == (200, None)


async def test_models_and_info_list_the_adapters(tmp_path: Path) -> None:
    (tmp_path / "cook").mkdir()
    async with serve(adapters=("poet",), adapter_rules=rules(tmp_path)) as served:
        await load(served, "cook", "cook")
        models = (await served.client.get("/v1/models")).json()["data"]
        info = (await served.client.get("/info")).json()

    assert [(each["id"], each["owned_by"]) for each in models] == [("m", "m"), ("poet", "m"), ("cook", "m")]
    assert info["engine"]["adapters"] == ["poet", "cook"]


async def test_an_adapter_is_loaded_used_and_unloaded(tmp_path: Path) -> None:
    (tmp_path / "cook").mkdir()
    async with serve(adapter_rules=rules(tmp_path)) as served:
        loaded = await load(served, "cook", tmp_path / "cook")
        await served.generate(adapter_id="cook", max_new_tokens=1)
        count, nbytes = await served.metric("tgi_adapters"), await served.metric("tgi_adapter_bytes")
        unloaded = await unload(served, "cook")
        after = await served.generate(adapter_id="cook")
        text = (await served.client.get("/metrics")).text
        (source,) = [args[0] for args in served.shard.called("load_adapter")]

    assert loaded == (200, "Success: LoRA adapter 'cook' added successfully.")
    assert unloaded == (200, "Success: LoRA adapter 'cook' removed successfully.")
    assert (source.name, source.location) == ("cook#1", str(tmp_path / "cook"))
    assert [request.adapter_id for request in served.requests] == ["cook#1"]
    assert served.shard.called("unload_adapter") == [("cook#1",)]
    assert (after.status_code, after.json()["error"].partition("no ")[2]) == (
        422,
        "adapter 'cook' is loaded; none is loaded",
    )
    assert (count, nbytes) == ("1", "1000")
    assert 'tgi_adapter_request_count{adapter="cook"} 1' in text
    assert "tgi_adapters 0" in text


async def test_an_adapter_is_unloaded_after_its_last_request(tmp_path: Path) -> None:
    (tmp_path / "cook").mkdir()
    may_decode = asyncio.Event()

    async def gate(method: str) -> None:
        if method == "decode":
            await may_decode.wait()

    async with serve(shard=ScriptedShard(gate=gate), adapter_rules=rules(tmp_path)) as served:
        await load(served, "cook", "cook")
        running = asyncio.create_task(served.generate(adapter_id="cook"))
        while not served.shard.called("decode"):  # noqa: ASYNC110  # the request is in its second step
            await asyncio.sleep(0)
        leaving = asyncio.create_task(unload(served, "cook"))
        await asyncio.sleep(0.01)
        refused = await served.generate(adapter_id="cook")
        before = served.shard.called("unload_adapter")
        may_decode.set()
        finished, left = await running, await leaving
        after = served.shard.called("unload_adapter")

    assert (refused.status_code, finished.status_code, left[0]) == (422, 200, 200)
    assert (before, after) == ([], [("cook#1",)])


async def test_an_adapter_that_is_loaded_again_reuses_no_prefix_of_the_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "cook").mkdir()
    prompt = " ".join(["word"] * 40)
    async with serve(adapter_rules=rules(tmp_path), use_prefix_caching=True) as served:
        await load(served, "cook", "cook")
        for _ in range(2):
            await served.generate(prompt, adapter_id="cook", max_new_tokens=1)
        await unload(served, "cook")
        await load(served, "cook", "cook")
        await served.generate(prompt, adapter_id="cook", max_new_tokens=1)
        replaced = await load(served, "cook", "cook", load_inplace=True)
        await served.generate(prompt, adapter_id="cook", max_new_tokens=1)
        sent = [(request.adapter_id, request.cache_len) for request in served.requests]
        await asyncio.sleep(0)
        unloaded = served.shard.called("unload_adapter")

    assert replaced[0] == 200
    assert sent == [("cook#1", 0), ("cook#1", 32), ("cook#2", 0), ("cook#3", 0)]
    assert unloaded == [("cook#1",), ("cook#2",)]


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [
        ("a", "..", "is not a directory below"),
        ("a", "/etc", "is not a directory below"),
        ("a", "link", "is not a directory below"),
        ("a", "missing", "is not a directory below"),
        ("a", ".", "is not a directory below"),
        ("a", "x\0y", "is not a directory below"),
        ("a b", "cook", "cannot have spaces"),
        ("a#2", "cook", "cannot have spaces"),
        ("tgi", "cook", "it selects the base model"),
        ("m", "cook", "is that of the model"),
        ("cook", "cook", "is loaded already"),
    ],
)
async def test_hardening_R2_names_and_paths_of_adapters_are_checked(
    tmp_path: Path, name: str, path: str, expected: str
) -> None:
    (tmp_path / "cook").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    async with serve(adapters=("cook",), adapter_rules=rules(tmp_path)) as served:
        status, text = await load(served, name, path)
        calls = served.shard.called("load_adapter")

    assert (status, calls) == (422, [])
    assert expected in text


async def test_the_routes_need_a_directory_a_key_and_room(tmp_path: Path) -> None:
    (tmp_path / "cook").mkdir()
    async with serve(adapters=("poet",)) as served:
        closed = await load(served, "cook", "cook")
    transport = TransportOptions(api_keys=("secret",))
    async with serve(adapter_rules=rules(tmp_path), transport=transport) as served:
        without_key = await load(served, "cook", "cook")
    async with serve(adapters=("poet",), adapter_rules=rules(tmp_path, max_adapters=1)) as served:
        full = await load(served, "cook", "cook")
        missing = await unload(served, "missing")

    assert closed[0] == 422
    assert "--adapter-directory" in closed[1]
    assert without_key[0] == 401
    assert full[0] == 422
    assert "--max-adapters" in full[1]
    assert missing[0] == 404


async def test_a_refusal_of_the_shard_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / "cook").mkdir()
    async with serve(adapter_rules=rules(tmp_path)) as served:
        served.shard.failures["load_adapter"] = ShardError("`use_dora` True is not served")
        status, text = await load(served, "cook", "cook")
        names = served.services.adapters.names

    assert (status, names) == (422, ())
    assert "use_dora" in text
