"""`python -m tests.support.clients.gevent_reader URL...`: one request to each, all at once, read on gevent's loop.

A process of its own, because gevent makes sockets cooperative for good. Prints one row per URL as JSON, and the
lateness of the ticks meanwhile.
"""

# ruff: noqa: E402 - patching comes before what it patches
from gevent import monkey

monkey.patch_all()

# isort: split
import contextlib
import json
import sys
import time

import gevent

from loadgen.dialects.dialect import Sampling
from loadgen.dialects.tgi import Tgi
from loadgen.http.call import CallCancelled, Client
from loadgen.http.connection import ConnectionPool, Origin
from loadgen.http.hub_connection import HubConnection
from loadgen.http.response_reader import CallLimits, ClientCall
from loadgen.http.timers import Ticker
from reports.run_schema import Status

LIMITS = CallLimits(total_s=5.0, stall_s=0.2, line_bytes=100_000)
CUT_AFTER_S = 1.0


def ask(client: Client, call: ClientCall) -> None:
    with contextlib.suppress(CallCancelled):
        client.run(b"{}", call)


def main() -> None:
    late_s: list[float] = []
    ticker = Ticker(0.01, late_s.append)
    exchanges = [ClientCall() for _ in sys.argv[1:]]
    pools = [ConnectionPool(Origin.parse(url), time.perf_counter_ns, HubConnection) for url in sys.argv[1:]]
    clients = [Client(pool, Tgi(Sampling()), {}, LIMITS, time.perf_counter_ns) for pool in pools]
    at_work = [gevent.spawn(ask, client, call) for client, call in zip(clients, exchanges, strict=True)]
    gevent.joinall(at_work, timeout=CUT_AFTER_S)
    for greenlet in at_work:
        greenlet.kill(CallCancelled(Status.CANCELLED))
    clients[0].run(b"{}", again := ClientCall())
    ticker.close()
    rows = [[str(each.status), each.error_type, len(each.answer.event_ns)] for each in (*exchanges, again)]
    print(json.dumps({"rows": rows, "ticks": len(late_s), "is_never_early": min(late_s) >= 0}))


if __name__ == "__main__":
    main()
