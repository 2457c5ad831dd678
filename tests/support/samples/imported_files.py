"""Files of other load generators, synthesized from their published schemas: guidellm 0.8 and aiperf 0.13."""

import random

ZERO_S = 1_800_000_000.0
"""The start of the loads, in seconds since 1970."""


def guidellm_report(**changes):
    """Two benchmarks of 40 requests each, closed loops of 1 and 2 users; TTFT 50 ms, 9 tokens 10 ms apart."""
    return {
        "metadata": {"version": 2, "guidellm_version": "0.8.1"},
        "config": {},
        "benchmarks": [guidellm_benchmark(users, **changes) for users in (1, 2)],
    }


def guidellm_benchmark(users, made=40):
    rows = []
    for number in range(40):
        start = ZERO_S + number // users * 0.14
        timings = {
            "targeted_start": start,
            "request_start": start,
            "first_token_iteration": start + 0.05,
            "last_token_iteration": start + 0.13,
            "request_end": start + 0.13,
            "resolve_end": start + 0.131,
            "token_iterations": 9,
        }
        info = {"request_id": f"g{number}", "status": "completed", "error": None, "timings": timings}
        rows.append({"request_id": f"g{number}", "info": info, "prompt_tokens": 12, "output_tokens": 9})
    end = max(row["info"]["timings"]["request_end"] for row in rows)
    strategy = {"type_": "concurrent", "streams": users} if users > 1 else {"type_": "synchronous"}
    return {
        "config": {"strategy": strategy, "backend": {"model": "m"}},
        "scheduler_metrics": {
            "request_start_time": ZERO_S,
            "measure_start_time": ZERO_S,
            "measure_end_time": end,
            "requests_made": {"successful": made, "errored": 0, "incomplete": 0, "total": made},
        },
        "requests": {"successful": rows, "errored": [], "incomplete": []},
    }


def aiperf_rows(unit="ms", gaps=True, num_measured=30, spread_ms=0.0):
    """One warm-up request, then measured ones: TTFT 40 ms, four gaps of 8 ms; every tenth failed.

    spread_ms: mean of the exponential times that are added to TTFT.
    """
    rows, random_ = [], random.Random(3)
    for number in range(num_measured + 1):
        slower = random_.expovariate(1 / spread_ms) if spread_ms else 0.0
        start = round((ZERO_S + 0.1 * number) * 1e9)
        metadata = {
            "x_request_id": f"a{number}",
            "credit_issued_ns": start - 1_000_000,
            "request_start_ns": start,
            "request_end_ns": start + round((72 + slower) * 1e6),
            "benchmark_phase": "warmup" if number == 0 else "profiling",
            "was_cancelled": False,
        }
        if number and number % 10 == 0:
            rows.append({"metadata": metadata, "metrics": {}, "error": {"type": "HTTPError", "code": 500}})
            continue
        metrics = {
            "time_to_first_token": {"value": 40.0 + slower, "unit": unit},
            "request_latency": {"value": 72.0 + slower, "unit": unit},
            "input_sequence_length": {"value": 16, "unit": "tokens"},
            "output_sequence_length": {"value": 5, "unit": "tokens"},
        }
        if gaps:
            metrics["inter_chunk_latency"] = {"value": [8.0] * 4, "unit": unit}
        rows.append({"metadata": metadata, "metrics": metrics, "error": None})
    return rows
