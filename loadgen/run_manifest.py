"""The manifest of a run: its content before the load, its end, and the schedule in the same folder."""

import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.config.distribution import Distribution
from loadgen.config.objectives import objectives_of
from loadgen.generator.load_process import WORKER_LOG, LoadProcess
from loadgen.http.arrival_times import total_arrival_times
from loadgen.preparation.prepare_run import PreparedRun
from loadgen.redaction import redacted, redacted_argv
from loadgen.run_directory import new_run_id
from loadgen.selftest.client_capacity import stored_capacity
from loadgen.target import machine
from loadgen.target.target import Target
from loadgen.target.telemetry import Telemetry
from loadgen.workloads.workload import Workload, text_hash
from reports.run_store import (
    CLIENT_FILE,
    SCHEMA_VERSION,
    RunManifest,
    replacing,
    write_client,
    write_manifest,
)


def new_manifest(
    config: BenchConfig,
    target: Target,
    prepared: PreparedRun,
    out: Path,
    command: Sequence[str],
    distribution: Distribution,
) -> RunManifest:
    facts, counter, length_check = prepared.facts, prepared.counter, prepared.length_check
    return RunManifest(
        run_id=out.name or new_run_id(),
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        command=redacted_argv(command),
        config=config.resolved() | {"api": facts.api},
        mode=config.mode,
        open_loop=config.is_open_loop,
        label=config.label,
        version=machine.product_version(),
        revision=machine.source_revision(),
        python=sys.version.split()[0],
        libraries=machine.library_versions(),
        machine=machine.describe_machine(),
        workers=distribution.count,
        seed=config.seed,
        salt=config.salt,
        workload_hash=prepared.work.digest,
        text_hash=text_hash(prepared.work.digest, config),
        schedule_hash=prepared.work.schedule_hash,
        tokenizer_hash=counter.digest if counter is not None else None,
        length_control=prepared.length_control,
        prefix_cache=config.prefix_cache,
        objectives=objectives_of(config.slo),
        price_per_hour=config.cost_per_hour,
        target={
            "url": target.url,
            "replicas": list(config.replicas),
            "api": facts.api,
            "model": facts.model,
            "engine": facts.kind.name,
            "engine_detected_by": facts.detected_by,
            "info": redacted(facts.info),
            "config": redacted(facts.config),
            "launch_argv": redacted_argv(target.launch_argv) if target.launch_argv is not None else None,
            "launch_chosen": list(target.launch_chosen),
            "reuses_connections": prepared.reuses_connections,
            "start_up": dataclasses.asdict(target.start_up) if target.start_up is not None else None,
            "token_counter": counter.source if counter is not None else None,
            "prefix_cache": dataclasses.asdict(prepared.work.cache),
            "prompt_lengths": prepared.estimate,
            "prompts_verified": length_check.checked if length_check is not None else 0,
            "prompt_length_error": length_check.largest_error if length_check is not None else None,
        },
        warmup_s=config.warmup_s,
        drain_s=config.drain_s,
        slots=config.concurrency if config.mode == "closed" and config.warmup_s else None,
    )


def write_schedule(out: Path, work: Workload) -> None:
    """Store the intended start of every request of an open loop."""
    if work.times_ns is None:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompt_ids = [prompt.prompt_id for prompt in work.scheduled()]
    metadata = {"schema_version": str(SCHEMA_VERSION)}
    table = pa.table({"t_intended_ns": work.times_ns, "prompt_id": prompt_ids})
    with replacing(out / "schedule.parquet") as file:
        pq.write_table(table.replace_schema_metadata(metadata), file)


def complete_manifest(
    manifest: RunManifest, load: LoadProcess, target: Target, out: Path, telemetry: Telemetry
) -> None:
    """Write the end of the run into the manifest and turn the files into their final form."""
    num_replicas = 1 + len(manifest.target["replicas"])
    end = load.end or {}
    manifest.window_end_s = end.get("window_end_s")
    manifest.drain["took_s"] = end.get("drain_s")
    manifest.stop_reason = load.stop_reason
    manifest.clipped = end.get("clipped") or {}
    manifest.target["info_end"] = redacted(target.info())
    if target.process is not None:
        manifest.target["server_exit_code"] = target.process.exit_code
    if load.started:
        started = load.started
        zero_s = started["wall_s"] - (started["at_ns"] - started["start_ns"]) / 1e9
        manifest.clock = {
            "wall_at_start_s": zero_s,
            "monotonic_at_start_s": started["start_ns"] / 1e9,
            "offset_s": end.get("clock_offset_s", 0.0),
            "offset_uncertainty_s": end.get("clock_error_s", 0.0),
        }
    client = _read_client(out)
    manifest.arrival_times = total_arrival_times(client.get("workers") or ())
    write_manifest(out, manifest)
    write_client(
        out,
        client
        | {
            # The counters of some replicas do not cover the load of all.
            "server_requests": telemetry.server_requests if telemetry.num_present == num_replicas else None,
            "capacity_events_per_s": stored_capacity(),
            "lost_workers": len(end.get("lost") or ()) or int(load.end is None and not load.is_finish_requested),
            "write_errors": int(client.get("write_errors") or 0) + telemetry.write_errors,
        },
    )
    from reports.metrics.finish_run import count_drain, finish_run

    finish_run(out)
    manifest.drain |= count_drain(out)
    write_manifest(out, manifest)
    log = out / WORKER_LOG
    if log.exists() and not log.stat().st_size:
        log.unlink()


def _read_client(out: Path) -> dict[str, Any]:
    """The health that the workers wrote; empty if they ended before."""
    path = out / CLIENT_FILE
    return dict(json.loads(path.read_bytes())) if path.exists() else {}
