"""A made-up bench run that looks like a real one: a queueing server, streamed tokens, a few failures."""

import heapq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from reports.run_schema import RequestRecord, Status
from reports.run_store import JsonlWriter, RunManifest, RunResult, write_client, write_manifest

SECOND = 1_000_000_000


@dataclass(frozen=True)
class SampleLoad:
    """The shape of a sample run; `slots` requests are served at once.

    max_in_flight: an open loop's server refuses requests above it.
    """

    run_id: str = "20261120-1359-sample"
    label: str = ""
    mode: str = "poisson"
    rate: float = 8.0
    concurrency: int = 16
    duration_s: float = 60.0
    warmup_s: float = 5.0
    slots: int = 24
    step_s: float = 0.018
    slowdown: float = 1.0
    failure_share: float = 0.01
    max_in_flight: int | None = None
    workers: int = 1
    seed: int = 0


def sample_run(load: SampleLoad | None = None) -> RunResult:
    """A whole run of `load`, the same one for the same load."""
    load = load or SampleLoad()
    random = np.random.default_rng(load.seed)
    records = _closed(load, random) if load.mode == "closed" else _open(load, random)
    last_s = max((record.t_end_ns or 0) for record in records) / SECOND
    return RunResult(
        manifest=_manifest(load),
        records=records,
        timeseries=_timeseries(load, records, last_s, random),
        server_metrics=_server_metrics(records, last_s),
        client={
            "workers": [
                {"worker": worker, "loop_lag_p99_s": 0.0011, "loop_lag_max_s": 0.012, "cpu_share": 0.31}
                for worker in range(load.workers)
            ],
            "lost_workers": 0,
            "write_errors": 0,
        },
    )


def write_sample_run(directory: Path, load: SampleLoad | None = None) -> RunResult:
    """A sample run in a directory, as a worker leaves it: manifest, client and JSONL files."""
    run = sample_run(load)
    directory.mkdir(parents=True, exist_ok=True)
    write_manifest(directory, run.manifest)
    write_client(directory, run.client)
    rows = {
        "requests": [record.to_json() for record in run.records],
        "timeseries": run.timeseries,
        "server_metrics": run.server_metrics,
    }
    for table, lines in rows.items():
        with JsonlWriter(directory / f"{table}.jsonl") as writer:
            for line in lines:
                writer.write(line)
    return run


def write_killed_run(directory: Path, after_s: float, load: SampleLoad | None = None) -> None:
    """A sample run killed after `after_s`: no client.json, no end in the manifest, no later rows."""
    run = sample_run(load)
    run.manifest.stop_reason = run.manifest.window_end_s = run.manifest.drain_s = None
    directory.mkdir(parents=True)
    write_manifest(directory, run.manifest)
    rows = {
        "requests": [each.to_json() for each in run.records if (each.t_end_ns or 0) <= after_s * SECOND],
        "timeseries": [row for row in run.timeseries if row["t_s"] <= after_s],
    }
    for table, lines in rows.items():
        with JsonlWriter(directory / f"{table}.jsonl") as writer:
            for line in lines:
                writer.write(line)


def _open(load: SampleLoad, random: np.random.Generator) -> list[RequestRecord]:
    count = int(load.rate * load.duration_s)
    due_s = np.sort(random.uniform(0, load.duration_s, count))
    free = [0.0] * load.slots
    heapq.heapify(free)
    records = []
    ends_s: list[float] = []
    for number, t_s in enumerate(due_s):
        ends_s = [end_s for end_s in ends_s if end_s > t_s]
        if load.max_in_flight is not None and len(ends_s) >= load.max_in_flight:
            records.append(_request(replace(load, failure_share=1.0), random, number, float(t_s), 0.0))
            continue
        begun = max(heapq.heappop(free), t_s)
        record = _request(load, random, number, float(t_s), begun - float(t_s))
        ends_s.append((record.t_end_ns or 0) / SECOND)
        heapq.heappush(free, (record.t_end_ns or 0) / SECOND if record.status == Status.OK else begun)
        records.append(record)
    return records


def _closed(load: SampleLoad, random: np.random.Generator) -> list[RequestRecord]:
    users = [(random.uniform(0, 0.2), user) for user in range(load.concurrency)]
    heapq.heapify(users)
    records: list[RequestRecord] = []
    while users:
        t_s, user = heapq.heappop(users)
        if t_s > load.duration_s:
            continue
        record = _request(load, random, len(records), t_s, random.exponential(0.004))
        heapq.heappush(users, ((record.t_end_ns or 0) / SECOND, user))
        records.append(record)
    return records


def _request(load: SampleLoad, random: np.random.Generator, number: int, due_s: float, queue_s: float) -> RequestRecord:
    input_tokens = int(min(max(random.lognormal(6.2, 0.9), 16), 6000))
    output_tokens = int(min(max(random.lognormal(4.2, 0.6), 4), 512))
    dispatch = due_s + random.exponential(0.0003)
    sent = dispatch + random.exponential(0.0004)
    record = RequestRecord(
        run_id=load.run_id,
        request_id=f"{load.run_id}-{number:05d}",
        prompt_id=f"p{number:05d}",
        phase="warmup" if due_s < load.warmup_s else "measure",
        t_intended_ns=_ns(due_s),
        t_dispatch_ns=_ns(dispatch),
        t_sent_ns=_ns(sent),
        conn_reused=number >= load.slots,
        connect_s=0.0004,
        planned_input_tokens=input_tokens,
        planned_output_tokens=output_tokens,
        requested_output_tokens=output_tokens,
        bytes_sent=input_tokens * 5,
    )
    if random.uniform() < load.failure_share:
        record.status, record.http_status = Status.OVERLOADED, 429
        record.error_type = "headers/overloaded"
        record.t_headers_ns = record.t_end_ns = _ns(sent + 0.004)
        return record
    first = sent + queue_s + load.slowdown * (0.012 + input_tokens * 3.2e-5) * random.lognormal(0, 0.12)
    step = load.step_s * load.slowdown
    gaps = step * random.lognormal(0, 0.10, output_tokens - 1)
    gaps[random.uniform(size=output_tokens - 1) < 0.02] += step * 3.5
    record.gap_ns = np.rint(gaps * SECOND).astype(np.int64).tolist()
    record.http_status = 200
    record.t_headers_ns = _ns(sent + 0.003)
    record.t_first_ns = record.t_first_answer_ns = _ns(first)
    record.t_last_ns = _ns(first) + sum(record.gap_ns)
    record.t_end_ns = record.t_last_ns + 200_000
    record.input_tokens = input_tokens
    record.cached_input_tokens = 0
    record.output_tokens = record.client_output_tokens = record.events = output_tokens
    record.first_event_tokens = 1
    record.tokens_source = "server_stream"
    record.finish_reason = "length" if random.uniform() < 0.8 else "eos_token"
    record.bytes_received = output_tokens * 110
    return record


def _ns(seconds: float) -> int:
    return round(float(seconds) * SECOND)


def _manifest(load: SampleLoad) -> RunManifest:
    return RunManifest(
        run_id=load.run_id,
        started_at="2026-11-20T13:59:00Z",
        command=["tgi-bench", "run", "--mode", load.mode, "--rate", f"{load.rate:g}", "--duration", "60s"],
        config={
            "mode": load.mode,
            "rate": load.rate if load.mode != "closed" else None,
            "concurrency": load.concurrency if load.mode == "closed" else None,
            "duration": load.duration_s - load.warmup_s,
            "workload": "azure_llm",
            "input_tokens": "lognormal(median 490)",
            "output_tokens": "lognormal(median 67)",
        },
        mode=load.mode,
        label=load.label,
        version="0.1.0",
        revision="0c1d2e3f",
        python="3.11.14",
        libraries={"locust": "2.42.0", "numpy": "2.4.6"},
        machine={"os": "Linux 6.8", "cpu": "AMD EPYC 9B14", "cpu_count": 2, "memory_bytes": 16 * 2**30},
        seed=load.seed,
        workload_hash="w-5b21",
        schedule_hash="s-90ac",
        tokenizer_hash="t-77e0",
        length_control="forced",
        clipped={"requests": 7, "input_tokens": 2214, "output_tokens": 0},
        objectives=[{"metric": "ttft_p95_ms", "max": 300}, {"metric": "tpot_mean_ms", "max": 40}],
        target={
            "url": "http://127.0.0.1:8080",
            "api": "tgi",
            "launch_argv": ["text-generation-launcher", "--model-id", "preset:tiny-llama"],
            "launch_chosen": ["--max-concurrent-requests", "1024"],
            "info": {
                "model_id": "preset:tiny-llama",
                "model_sha": None,
                "model_dtype": "bfloat16",
                "model_device_type": "cpu",
                "version": "0.1.0",
                "sha": "0c1d2e3f",
                "docker_label": None,
                "max_concurrent_requests": 1024,
                "max_input_tokens": 16383,
                "max_total_tokens": 16384,
                "engine": {"attention": {"prefill": "torch", "decode": "torch"}, "prefill_chunking": True},
            },
        },
        warmup_s=load.warmup_s,
        slots=load.concurrency if load.mode == "closed" else None,
        window_end_s=load.duration_s,
        drain_s=30.0,
        stop_reason="duration",
    )


def _timeseries(
    load: SampleLoad, records: list[RequestRecord], last_s: float, random: np.random.Generator
) -> list[dict[str, float | int]]:
    sent = np.array([record.t_sent_ns or 0 for record in records]) / SECOND
    end = np.array([record.t_end_ns or 0 for record in records]) / SECOND
    return [
        {
            "t_s": float(second),
            "worker": worker,
            "in_flight": int(((sent <= second) & (end > second)).sum()),
            "sent": int(((sent >= second) & (sent < second + 1)).sum()),
            "completed": int(((end >= second) & (end < second + 1)).sum()),
            "failed": 0,
            "loop_lag_max_s": float(random.exponential(0.0008)),
            "cpu_share": float(np.clip(random.normal(0.3, 0.03), 0, 1)),
        }
        for worker in range(load.workers)
        for second in range(int(last_s) + 1)
    ]


def _server_metrics(records: list[RequestRecord], last_s: float) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    sent = np.array([record.t_sent_ns or 0 for record in records]) / SECOND
    end = np.array([record.t_end_ns or 0 for record in records]) / SECOND
    for second in range(int(last_s) + 2):
        running = int(((sent <= second) & (end > second)).sum())
        done = int((end <= second).sum())
        values = {
            "tgi_queue_size": max(running - 20, 0),
            "tgi_batch_current_size": min(running, 20),
            "tgi_request_queue_duration_sum": done * 0.011,
            "tgi_request_queue_duration_count": done,
            "tgi_request_count": done,
            "tgi_request_validation_duration_sum": done * 0.0008,
            "tgi_request_validation_duration_count": done,
            "tgi_request_inference_duration_sum": done * 1.31,
            "tgi_request_inference_duration_count": done,
            "tgi_batch_current_max_tokens": min(running, 20) * 640,
            "tgi_batch_max_total_tokens": 16384,
            "tgi_prompt_tokens": done * 700,
            "tgi_prefix_hit_tokens": done * 90 + 12 * second,
        }
        rows += [{"t_s": float(second), "name": name, "labels": "", "value": float(v)} for name, v in values.items()]
    return rows
