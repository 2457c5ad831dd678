from pathlib import Path

import pytest

from reference_server.configuration.config import RouterConfig
from reference_server.configuration.settings import load
from reference_server.errors import ArgumentError
from reference_server.router.api_key import ApiKeys, read_keys
from reference_server.router.app import TransportOptions
from reference_server.router.start.startup import warn_of_open_routes
from tests.support.servers.serving import serve

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("header", "number"),
    [
        (b"Bearer one", 0),
        (b"bearer two", 1),
        (b"Bearer three", None),
        (b"Bearer one ", None),
        (b"Bearer ", None),
        (b"one", None),
        (None, None),
    ],
)
def test_each_key_is_valid_and_nothing_else(header: bytes | None, number: int | None):
    assert ApiKeys(["one", "two"]).match(header) == number


def test_without_a_key_no_header_matches():
    keys = ApiKeys([""])

    assert not keys.is_set
    assert keys.match(b"Bearer ") is None


def test_a_file_has_a_key_on_each_line(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# team a\none\n\n  two  \n")

    assert read_keys(file) == ("one", "two")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read `api_key_file` .*: No such file"), (b"# none\n", "has no key"), (b"\xff\n", "not UTF-8")],
)
def test_a_file_without_a_key_is_refused_at_the_start(tmp_path: Path, content: bytes | None, message: str):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ArgumentError, match=message):
        read_keys(file)


async def test_a_server_with_two_keys_accepts_both():
    async with serve(transport=TransportOptions(api_keys=("one", "two"))) as served:
        statuses = {}
        for key in ("one", "two", "three"):
            answer = await served.client.post(
                "/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"}
            )
            statuses[key] = answer.status_code

    assert statuses == {"one": 200, "two": 200, "three": 401}


def test_a_server_with_a_key_file_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    flags = ["--hostname", "0.0.0.0", "--api-key-file", str(tmp_path / "keys"), "--auth-all-routes"]

    warn_of_open_routes(load(RouterConfig, flags, {}).config)

    assert caplog.text == ""
