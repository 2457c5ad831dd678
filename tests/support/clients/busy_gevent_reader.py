"""`python -m tests.support.clients.busy_gevent_reader URL`: four streams on a loop that is blocked for 50 ms at a time.

A process of its own, because gevent makes sockets cooperative for good. Prints the times of the events by prompt, the
longest time from arrival to read, and the source of the times.
"""

# ruff: noqa: E402 - patching comes before what it patches
from gevent import monkey

monkey.patch_all()

# isort: split
import json
import sys
import time

import gevent

from loadgen.dialects.dialect import Sampling
from loadgen.dialects.tgi import Tgi
from loadgen.http.call import Client
from loadgen.http.connection import ConnectionPool, Origin
from loadgen.http.hub_connection import HubConnection
from loadgen.http.response_reader import CallLimits, ClientCall
from loadgen.workloads.prompts.prompt import Prompt

BLOCKED_S = 0.05
block = monkey.get_original("time", "sleep")


def keep_busy() -> None:
    while True:
        block(BLOCKED_S)
        gevent.sleep(0.001)


def main() -> None:
    pool = ConnectionPool(Origin.parse(sys.argv[1]), time.perf_counter_ns, HubConnection)
    client = Client(pool, Tgi(Sampling()), {}, CallLimits(), time.perf_counter_ns)
    calls = {f"request {number}": ClientCall() for number in range(4)}
    busy = gevent.spawn(keep_busy)
    gevent.joinall(
        [
            gevent.spawn(client.run, client.dialect.body(Prompt(name, text=name, output_tokens=20)), call)
            for name, call in calls.items()
        ]
    )
    busy.kill()
    found = {
        "event_ns": {name: call.answer.event_ns for name, call in calls.items()},
        "read_late_ns": max(call.read_late_ns for call in calls.values()),
        "arrival_times": pool.arrivals.to_json(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
