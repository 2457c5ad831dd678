"""`measure`: one run against one target, as `tgi-bench`, the tuner and the gate make it.

Prepares the workload, starts the load process, scrapes the server meanwhile, and always leaves a finished run
directory.
"""

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.config.bench_config import BenchConfig
from loadgen.config.distribution import Distribution
from loadgen.config.objectives import objectives_of
from loadgen.config.target_settings import OF_ACCESS
from loadgen.dialects.registry import open_dialect
from loadgen.errors import WorkerError
from loadgen.generator.load_process import LoadProcess, StartLoad, log_tail
from loadgen.generator.worker_messages import WorkerPlan
from loadgen.interrupts import Interrupted, TwoStageInterrupt
from loadgen.preparation.length_control import probe_sampling
from loadgen.preparation.prepare_run import PreparedRun, prepare_run
from loadgen.progress import ProgressDisplay, SilentProgress
from loadgen.run_directory import make_run_directory
from loadgen.run_manifest import complete_manifest, new_manifest, write_schedule
from loadgen.target.accelerator import Accelerators, open_accelerators
from loadgen.target.cache_reset import reset_cache
from loadgen.target.health_probe import HealthProbe
from loadgen.target.idle import wait_until_idle
from loadgen.target.metrics_source import metrics_sources, open_metrics_sources
from loadgen.target.replicas import check_replicas, replicas_of
from loadgen.target.target import Target
from loadgen.target.telemetry import Telemetry
from loadgen.terminal.progress_line import RunLength
from reports.run_store import (
    JsonlWriter,
    RunManifest,
    RunResult,
    write_manifest,
)

if TYPE_CHECKING:
    from loadgen.generator.stop_rules import StopRule
    from loadgen.generator.stop_watcher import StopWatcher

MAX_IDLE_WAIT_S = 30.0


class InterruptedRun(Interrupted):
    """A signal ended the run; its files are finished and `result` holds the requests measured so far."""

    def __init__(self, number: signal.Signals, result: RunResult) -> None:
        super().__init__(number)
        self.result = result


def measure(
    config: BenchConfig,
    target: Target,
    out: Path,
    progress: ProgressDisplay | None = None,
    command: Sequence[str] = (),
    distribution: Distribution | None = None,
    start_load: StartLoad | None = None,
) -> RunResult:
    """Measure a target that answers; `out` becomes the run directory. By default this machine makes the load.

    start_load: of the load process, if it is not a new one.

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
    manifest = new_manifest(config, target, prepared, out, command, distribution)
    accelerators = open_accelerators(target.url)
    if accelerators is not None:
        manifest.target["accelerator"] = accelerators.description
        manifest.target["driver"] = accelerators.driver
    if config.reset_cache:
        manifest.target["cache_reset"] = _reset_caches(config, prepared, replicas, progress)
    write_manifest(out, manifest)
    write_schedule(out, prepared.work)
    if config.prefix_cache == "warm":
        _warm_prefix_cache(config, prepared, replicas, progress)
    telemetry = _start_telemetry(config, prepared, replicas, manifest, accelerators, out, progress)
    load = LoadProcess(progress, lambda start_ns: watchers.begin(start_ns), start_load)
    watchers = RunWatchers(
        telemetry,
        _health_probes(config, prepared, replicas, load, progress),
        _open_stop_watcher(config, manifest, out, load.end_window),
    )
    progress.begin(expected_length(config, len(prepared.work.times_ns or ())))
    try:
        with TwoStageInterrupt(load.finish, load.kill) as signals:
            load.run(_plan(config, target, prepared, manifest, out), distribution, out)
            if signals.first is None:
                _wait_for_servers(config, replicas, progress)
    finally:
        progress.close()
        watchers.finish()
    complete_manifest(manifest, load, target, out, telemetry)
    return _result_of(load, out, signals.first)


def _result_of(load: LoadProcess, out: Path, received: signal.Signals | None) -> RunResult:
    """The stored run. Raises InterruptedRun after a signal, WorkerError if the load process failed."""
    from reports.saved_run import load_run

    result = load_run(out)
    if received is not None:
        raise InterruptedRun(received, result)
    if load.failure is not None:
        raise WorkerError(load.failure)
    if load.end is None:
        raise WorkerError(
            f"the load generator's process ended early (exit code {load.exit_code}); its records are in {out}\n"
            + log_tail(out)
        )
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class RunWatchers:
    """The observers of a load: the server's metrics, its health, and the rules that end the window early."""

    telemetry: Telemetry
    probes: "Sequence[HealthProbe]"
    stop_watcher: "StopWatcher | None"

    def begin(self, start_ns: int) -> None:
        """start_ns: the start of the load, on the monotonic clock."""
        self.telemetry.begin_run(start_ns)
        for probe in self.probes:
            probe.start()
        if self.stop_watcher is not None:
            self.stop_watcher.start()

    def finish(self) -> None:
        for probe in self.probes:
            probe.finish()
        if self.stop_watcher is not None:
            self.stop_watcher.finish()
        self.telemetry.finish()


def _start_telemetry(
    config: BenchConfig,
    prepared: PreparedRun,
    replicas: Sequence[Target],
    manifest: RunManifest,
    accelerators: Accelerators | None,
    out: Path,
    progress: ProgressDisplay,
) -> Telemetry:
    """Scrape the metrics of every replica from now on; servers without metrics are named in the manifest."""
    sources = metrics_sources([each.url for each in replicas], replicas[0].access, config.metrics_url)
    telemetry = Telemetry(sources, JsonlWriter(out / "server_metrics.jsonl"), accelerators)
    telemetry.start()
    if telemetry.without_metrics:
        places = "" if len(sources) == 1 else f" from {', '.join(telemetry.without_metrics)}"
        manifest.target["server_metrics"] = f"{prepared.facts.kind.without_metrics}{places}"
        progress.show(f"server metrics: {manifest.target['server_metrics']}")
    return telemetry


def _health_probes(
    config: BenchConfig, prepared: PreparedRun, replicas: Sequence[Target], load: LoadProcess, progress: ProgressDisplay
) -> list[HealthProbe]:
    """A probe of each replica; the load ends if one of them stops answering."""

    def stop_unhealthy(route: str) -> None:
        progress.show(f"the server no longer answers {route}; ending the load")
        load.stop("server_unhealthy")

    routes = prepared.facts.kind.health_routes
    return [HealthProbe(each.control(), config.unhealthy_probes, stop_unhealthy, routes) for each in replicas]


def expected_length(config: BenchConfig, planned_requests: int) -> RunLength:
    """The time or the number of requests of a run, as far as either is planned.

    A point of a series is planned for its least duration; its `duration` is a limit.
    """
    if config.least_duration:
        return RunLength(config.warmup_s, config.least_duration, can_extend=True)
    if config.duration_s is not None:
        return RunLength(config.warmup_s, config.duration_s)
    return RunLength(config.warmup_s, requests=config.requests or planned_requests or None)


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
