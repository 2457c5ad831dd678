import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

from tests.support.servers.raw_server import raw_server

ROOT = Path(__file__).resolve().parents[3]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
TOKEN = b'data:{"token":{"id":1,"text":"a"}}\n\n'
LAST = b'data:{"token":{"id":1,"text":"a"},"generated_text":"a"}\n\n'


def test_every_end_has_the_status_that_a_blocking_read_gives_it():
    """One stream continues until the generator cuts it. After all, the first server is called again."""
    cases = [
        ([HEAD, TOKEN, LAST], {}, ["ok", None, 2]),
        ([HEAD, TOKEN + TOKEN + LAST], {}, ["ok", None, 3]),
        ([HEAD + TOKEN], {}, ["truncated", "stream/no terminator", 1]),
        ([HEAD, TOKEN], {"resets": True}, ["truncated", "stream/ConnectionResetError", 1]),
        ([], {"resets": True}, ["connect_error", "headers/ConnectionResetError", 0]),
        ([HEAD + TOKEN, *[b": x\n"] * 100], {"pause_s": 0.02}, ["timeout", "stream/stall_timeout", 1]),
        (itertools.chain([HEAD, b"data:"], itertools.repeat(b"x" * 10_000)), {}, None),
        ([HEAD + b"data:{]}\n\n"], {}, None),
        (itertools.chain([HEAD], itertools.repeat(TOKEN)), {"pause_s": 0.05}, None),
    ]
    with contextlib.ExitStack() as servers:
        urls = [
            servers.enter_context(raw_server(lambda pieces=pieces: pieces, **options)) for pieces, options, _ in cases
        ]
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.clients.gevent_reader", *urls],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
    found = json.loads(done.stdout)

    rows = found["rows"]
    assert [row for row, case in zip(rows, cases, strict=False) if case[2]] == [case[2] for case in cases if case[2]]
    assert [row[0] for row in rows[-4:]] == ["protocol_error", "bad_payload", "cancelled", "ok"]
    assert rows[-2][2] > 0
    assert found["ticks"] > 0
    assert found["is_never_early"]
