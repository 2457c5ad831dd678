"""Tests whether a server keeps a connection open after an answer, before the load relies on it.

llama-server closes the connection after each stream, although it announces keep-alive: every request sent at once on
such a connection fails with a reset.
"""

import time

from loadgen.dialects.dialect import Dialect
from loadgen.http.call import Client
from loadgen.http.connection import ConnectionPool, Origin
from loadgen.http.response_reader import CallLimits, ClientCall
from loadgen.target.target import Target
from loadgen.workloads.prompts.prompt import Prompt
from reports.run_schema import Status

# Longer than a round trip to a distant server.
CLOSES_WITHIN_S = 0.25
LIMITS = CallLimits(total_s=60.0)


def keeps_connections(target: Target, dialect: Dialect) -> bool:
    """Whether a connection is still open a moment after an answer of one token; True if there is no answer."""
    pool = ConnectionPool(Origin.parse(target.url), time.perf_counter_ns, tls=target.access.tls)
    client = Client(pool, dialect, target.access.headers, LIMITS, time.perf_counter_ns)
    call = ClientCall()
    try:
        client.run(dialect.body(Prompt("connection", text="a", output_tokens=1)), call)
        return call.status != Status.OK or not pool.closes_within(CLOSES_WITHIN_S)
    finally:
        pool.close()
