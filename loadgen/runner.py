"""`measure`: one run against one target, as `tgi-bench`, the tuner and the gate make it.

Prepares the workload, starts the load process, scrapes the server meanwhile, and always leaves a finished run
directory.
"""

import dataclasses
import datetime
import itertools
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import OF_ACCESS
from loadgen.config.distribution import Distribution
from loadgen.config.objectives import objectives_of
from loadgen.dialects.registry import open_dialect
from loadgen.errors import MeasurementError, UsageError, WorkerError
from loadgen.generator.load_process import WORKER_LOG, LoadProcess, log_tail
from loadgen.generator.messages import WorkerPlan
from loadgen.http.arrival_times import total_arrival_times
from loadgen.interrupts import Interrupted, TwoStageInterrupt
from loadgen.preparation import PreparedRun, prepare_run, probe_sampling
from loadgen.progress import ProgressDisplay, SilentProgress
from loadgen.redaction import redacted, redacted_argv
from loadgen.selftest.client_capacity import stored_capacity
from loadgen.target import machine
from loadgen.target.accelerator import open_accelerators
from loadgen.target.cache_reset import reset_cache
from loadgen.target.health_probe import HealthProbe
from loadgen.target.idle import wait_until_idle
from loadgen.target.metrics_source import metrics_sources, open_metrics_sources
from loadgen.target.replicas import check_replicas, replicas_of
from loadgen.target.target import Target
from loadgen.target.telemetry import Telemetry
from loadgen.terminal.progress_line import RunLength
from loadgen.workloads.workload import Workload, text_hash
from reports.run_store import (
    CLIENT_FILE,
    MANIFEST_FILE,
    SCHEMA_VERSION,
    JsonlWriter,
    RunManifest,
    RunResult,
    write_client,
    write_manifest,
)

if TYPE_CHECKING:
    from loadgen.generator.stop_rules import StopRule
    from loadgen.generator.stop_watcher import StopWatcher

MAX_IDLE_WAIT_S = 30.0
MIN_FREE_BYTES = 64 * 2**20


class InterruptedRun(Interrupted):
    """A signal ended the run; its files are finished and `result` holds the requests measured so far."""

    def __init__(self, number: signal.Signals, result: RunResult) -> None:
        super().__init__(number)
        self.result = result


def new_run_id(now: datetime.datetime | None = None) -> str:
    """A unique name that sorts by time."""
    now = now or datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def measure(
    config: BenchConfig,
    target: Target,
    out: Path,
    progress: ProgressDisplay | None = None,
    command: Sequence[str] = (),
    distribution: Distribution | None = None,
) -> RunResult:
    """Measure a target that answers; `out` becomes the run directory. By default this machine makes the load.

    Raises UsageError if the directory holds a run or the workload is wrong, TargetError if the server does not answer,
    WorkerError if the load process failed, InterruptedRun if a signal ended the run.
    """
    progress = progress or SilentProgress()
    objectives_of(config.slo)
    distribution = distribution or Distribution(config.workers)
    distribution.check(config)
    _stop_rules(config)
    config = config.salted()
    make_run_directory(out)
    prepared = prepare_run(config, target, progress)
    replicas = replicas_of(config, target)
    check_replicas(config, replicas, prepared.facts)
    manifest = _manifest(config, target, prepared, out, command, distribution)
    accelerators = open_accelerators(target.url)
    if accelerators is not None:
        manifest.target["accelerator"] = accelerators.description
        manifest.target["driver"] = accelerators.driver
    if config.reset_cache:
        manifest.target["cache_reset"] = _reset_caches(config, prepared, replicas, progress)
    write_manifest(out, manifest)
    _write_schedule(out, prepared.work)
    if config.prefix_cache == "warm":
        _warm_prefix_cache(config, prepared, replicas, progress)
    sources = metrics_sources([each.url for each in replicas], target.access, config.metrics_url)
    telemetry = Telemetry(sources, JsonlWriter(out / "server_metrics.jsonl"), accelerators)
    telemetry.start()
    if telemetry.without_metrics:
        places = "" if len(sources) == 1 else f" from {', '.join(telemetry.without_metrics)}"
        manifest.target["server_metrics"] = f"{prepared.facts.kind.without_metrics}{places}"
        progress.show(f"server metrics: {manifest.target['server_metrics']}")

    def stop_unhealthy(route: str) -> None:
        progress.show(f"the server no longer answers {route}; ending the load")
        load.stop("server_unhealthy")

    def start_watchers(start_ns: int) -> None:
        telemetry.begin_run(start_ns)
        for health in probes:
            health.start()
        if stop_watcher is not None:
            stop_watcher.start()

    load = LoadProcess(progress, start_watchers)
    progress.begin(_expected_length(config, prepared.work))
    stop_watcher = _open_stop_watcher(config, manifest, out, load.end_window)
    routes = prepared.facts.kind.health_routes
    probes = [HealthProbe(each.control(), config.unhealthy_probes, stop_unhealthy, routes) for each in replicas]
    try:
        with TwoStageInterrupt(load.finish, load.kill) as signals:
            load.run(_plan(config, target, prepared, manifest, out), distribution, out)
            if signals.first is None:
                _wait_for_servers(config, replicas, progress)
    finally:
        progress.close()
        for health in probes:
            health.finish()
        if stop_watcher is not None:
            stop_watcher.finish()
        telemetry.finish()
    _complete(manifest, load, target, out, telemetry)
    from reports.saved_run import load_run

    result = load_run(out)
    if signals.first is not None:
        raise InterruptedRun(signals.first, result)
    if load.failure is not None:
        raise WorkerError(load.failure)
    if load.end is None:
        raise WorkerError(
            f"the load generator's process ended early (exit code {load.exit_code}); its records are in {out}\n"
            + log_tail(out)
        )
    return result


def _expected_length(config: BenchConfig, work: Workload) -> RunLength:
    """The time or the number of requests of a run, as far as either is planned."""
    if config.duration_s is not None:
        return RunLength(config.warmup_s, config.duration_s)
    return RunLength(config.warmup_s, requests=config.requests or len(work.times_ns or ()) or None)


def _stop_rules(config: BenchConfig) -> "tuple[StopRule, ...]":
    """The rules that need statistics, which are imported only if there are any. Raises UsageError."""
    if not config.has_stop_rules:
        return ()
    from loadgen.generator.stop_rules import stop_rules_of

    return stop_rules_of(config)


def _open_stop_watcher(
    config: BenchConfig, manifest: RunManifest, out: Path, on_stop: Callable[[str], None]
) -> "StopWatcher | None":
    rules = _stop_rules(config)
    if not rules:
        return None
    from loadgen.generator.stop_watcher import StopWatcher

    return StopWatcher(manifest, out, rules, on_stop)


def make_run_directory(out: Path) -> None:
    """Create a directory. Raises UsageError if it holds a run or cannot be created, MeasurementError if full."""
    if (out / MANIFEST_FILE).exists():
        raise UsageError(f"{out} already holds a run; choose another --out or remove it")
    try:
        # Prompts and answers are for this user alone.
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(out).free
    except OSError as error:
        raise UsageError(f"`out` is {str(out)!r}: {error.strerror}") from error
    if free_bytes < MIN_FREE_BYTES:
        raise MeasurementError(
            f"{out} has {free_bytes / 2**20:.0f} MiB free, but a run needs {MIN_FREE_BYTES // 2**20} MiB"
        )


def _reset_caches(
    config: BenchConfig, prepared: PreparedRun, replicas: Sequence[Target], progress: ProgressDisplay
) -> str:
    """Empty the prefix cache of each replica. Returns the last result. Raises UsageError, TargetError."""
    facts, result = prepared.facts, ""
    for target in replicas:
        result = reset_cache(
            target, facts.kind, open_dialect(facts.api, probe_sampling(config, facts)), config.metrics_url
        )
        progress.show(f"cache reset of {target.url}: {result}")
    return result


def _warm_prefix_cache(
    config: BenchConfig, prepared: PreparedRun, replicas: Sequence[Target], progress: ProgressDisplay
) -> None:
    """Send every shared prefix once to each replica, before the load. Raises TargetError if one fails."""
    prefixes = prepared.work.shared_prefixes()
    progress.show(f"warming the prefix cache with {len(prefixes)} prefixes")
    for target, prefix in itertools.product(replicas, prefixes):
        target.generate_once(prepared.facts.api, prepared.facts.model, prefix, config.extra_body)


def _wait_for_servers(config: BenchConfig, replicas: Sequence[Target], progress: ProgressDisplay) -> None:
    """Wait for the end of the requests that the load cancelled, so that they do not slow the next run."""
    urls, access = [each.url for each in replicas], replicas[0].access
    with open_metrics_sources(urls, access, config.metrics_url) as sources:
        waits = {source.name: wait_until_idle(source, min(config.drain_s, MAX_IDLE_WAIT_S)) for source in sources}
    for name, num_requests in waits.items():
        if num_requests:
            progress.show(f"{name} still reports {num_requests} requests; they may slow the next run")


def _manifest(
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


def _plan(config: BenchConfig, target: Target, prepared: PreparedRun, manifest: RunManifest, out: Path) -> WorkerPlan:
    return WorkerPlan(
        run_id=manifest.run_id,
        directory=str(out.resolve()),
        parent_pid=os.getpid(),
        url=target.url,
        api=prepared.facts.api,
        config=config.model_dump(mode="json", exclude=set(OF_ACCESS)),
        sampling=prepared.sampling,
        limits=dataclasses.asdict(prepared.facts.limits),
        vocabulary=dataclasses.asdict(prepared.vocabulary) if prepared.vocabulary is not None else None,
        answer_tokens=prepared.answer_tokens,
        cache=dataclasses.asdict(prepared.work.cache),
        headers=dict(target.access.headers),
        tls=dataclasses.asdict(target.access.tls),
        reuses_connections=prepared.reuses_connections,
        workload_hash=prepared.work.digest,
        schedule_hash=prepared.work.schedule_hash,
    )


def _complete(manifest: RunManifest, load: LoadProcess, target: Target, out: Path, telemetry: Telemetry) -> None:
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
    from reports.metrics.finish import count_drain, finish_run

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


def _write_schedule(out: Path, work: Workload) -> None:
    """Store the intended start of every request of an open loop."""
    if work.times_ns is None:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompt_ids = [prompt.prompt_id for prompt in work.scheduled()]
    part = out / "schedule.parquet.part"
    metadata = {"schema_version": str(SCHEMA_VERSION)}
    table = pa.table({"t_intended_ns": work.times_ns, "prompt_id": prompt_ids})
    pq.write_table(table.replace_schema_metadata(metadata), part)
    part.replace(out / "schedule.parquet")
