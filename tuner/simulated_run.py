"""A simulated load as a run directory, so that every report and comparison of measured runs reads it."""

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadgen.config import BenchConfig
from reports.records import Phase, RequestRecord, Status
from reports.results import REQUESTS as REQUESTS_TABLE
from reports.results import JsonlWriter, RunManifest, finish_run, write_manifest
from tuner.replica import Flight
from tuner.simulate import NS_PER_S, Simulated

LABEL = "simulated"


def write_run(directory: Path, run: Simulated, config: BenchConfig, facts: dict[str, Any]) -> Path:
    """Write manifest and requests; `facts` go into the manifest's labels. The started time is that of the epoch."""
    directory.mkdir(parents=True, exist_ok=True)
    run_id = directory.name
    manifest = RunManifest(
        run_id,
        started_at=datetime.fromtimestamp(0, UTC).isoformat(),
        config=config.resolved(),
        mode=config.mode,
        label=LABEL,
        labels={"simulated": "true", **{name: str(value) for name, value in facts.items()}},
        seed=config.seed,
        warmup_s=run.start_ns / NS_PER_S,
        slots=config.users if not config.is_open_loop else None,
        window_end_s=run.end_ns / NS_PER_S,
        stop_reason="duration",
    )
    write_manifest(directory, manifest)
    with JsonlWriter(directory / f"{REQUESTS_TABLE}.jsonl") as writer:
        for flight in sorted(run.flights, key=lambda each: each.id):
            writer.write(record_of(flight, run_id, run).to_json())
    finish_run(directory)
    return directory


def record_of(flight: Flight, run_id: str, run: Simulated) -> RequestRecord:
    """One request as the load generator would have seen it."""
    is_ok = flight.status == "ok"
    times = flight.token_ns
    return RequestRecord(
        run_id,
        f"{run_id}-{flight.id}",
        prompt_id=str(flight.id),
        phase=Phase.WARMUP if flight.intended_ns < run.start_ns else Phase.MEASURE,
        status=Status(flight.status) if flight.status else Status.UNFINISHED,
        finish_reason="length" if is_ok else None,
        t_intended_ns=flight.intended_ns,
        t_dispatch_ns=flight.sent_ns,
        t_sent_ns=flight.sent_ns,
        t_first_ns=flight.first_ns if is_ok else None,
        t_last_ns=flight.end_ns if is_ok else None,
        t_end_ns=flight.end_ns if flight.end_ns >= 0 else None,
        planned_input_tokens=flight.input_tokens,
        planned_output_tokens=flight.output_tokens,
        requested_output_tokens=flight.declared_tokens,
        input_tokens=flight.input_tokens,
        cached_input_tokens=flight.cached_tokens,
        output_tokens=flight.generated if is_ok else None,
        tokens_source="server_stream",
        events=len(times),
        gap_ns=[later - earlier for earlier, later in pairwise(times)],
        srv_queue_s=(flight.started_ns - flight.sent_ns) / NS_PER_S if flight.started_ns >= 0 else None,
    )
