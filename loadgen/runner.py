"""`run`: one measurement of one target. What `tgi-bench`, the tuner and the gate call.

Prepares the workload, starts the worker process, watches it, scrapes the server meanwhile, and leaves a finished run
directory, whatever happened.
"""

import dataclasses
import datetime
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen import machine, workload
from loadgen.accelerator import open_accelerators
from loadgen.capacity import stored_capacity
from loadgen.config import BenchConfig
from loadgen.control import ControlClient
from loadgen.counting import RoundTrip, TokenCounter, make_vocabulary, open_counter, verify
from loadgen.datasets.vocabulary import Vocabulary
from loadgen.distribution import Distribution
from loadgen.errors import MeasurementError, TargetError, UsageError, WorkerError
from loadgen.health import ASKED_TO_STOP, UNHEALTHY_SIGNAL, HealthProbe
from loadgen.interrupts import FirstAsksSecondEnds, Interrupted
from loadgen.load_process import WORKER_LOG, log_tail, start_load
from loadgen.objectives import objectives_of
from loadgen.plan import WorkerPlan
from loadgen.progress import Progress, Silent
from loadgen.protocols.dialect import Sampling
from loadgen.redaction import redacted, redacted_argv
from loadgen.target import ServerFacts, Target
from loadgen.telemetry import Telemetry
from loadgen.workload import Workload
from reports.results import (
    CLIENT_FILE,
    SCHEMA_VERSION,
    JsonlWriter,
    RunManifest,
    RunResult,
    finish_run,
    load_run,
    write_client,
    write_manifest,
)

if TYPE_CHECKING:
    from loadgen.follow_up import FollowUp
    from loadgen.stop_rules import StopRule

LEAST_FREE_BYTES = 64 * 2**20


class InterruptedRun(Interrupted):
    """A run that was stopped by a signal and finished its files; `result` is what was measured."""

    def __init__(self, number: signal.Signals, result: RunResult) -> None:
        super().__init__(number)
        self.result = result


def new_run_id(now: datetime.datetime | None = None) -> str:
    """A name that sorts by time and does not repeat."""
    now = now or datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def run(
    config: BenchConfig,
    target: Target,
    out: Path,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    distribution: Distribution | None = None,
) -> RunResult:
    """Measure a target that answers; `out` becomes the run directory. This machine makes the load by default.

    Raises UsageError when the directory holds a run or the workload is wrong, TargetError when the server does not
    answer, WorkerError when the load could not be made, InterruptedRun when a signal ended it.
    """
    progress = progress or Silent()
    objectives_of(config.slo)
    distribution = distribution or Distribution(config.workers, key=secrets.token_hex(16))
    distribution.check(config)
    _stop_rules(config)
    make_run_directory(out)
    prepared = _prepare(config, target, progress)
    manifest = _manifest(config, target, prepared, out, command, distribution)
    accelerators = open_accelerators(target.url)
    if accelerators is not None:
        manifest.target["accelerator"] = accelerators.description
        manifest.target["driver"] = accelerators.driver
    write_manifest(out, manifest)
    _write_schedule(out, prepared.work)
    if config.prefix_cache == "warm":
        _warm(prepared.work, target, prepared.facts, progress)
    telemetry = Telemetry(target.control(), JsonlWriter(out / "server_metrics.jsonl"), accelerators)
    telemetry.start()
    watch = _Watch(progress, telemetry)
    follow_up = _follow_up(config, manifest, out, watch.stop)
    watch.follow_up = follow_up
    watch.health = health = HealthProbe(target.control(), config.unhealthy_probes, watch.stop_unhealthy)
    try:
        with FirstAsksSecondEnds(watch.ask_to_finish, watch.kill) as signals:
            watch.follow(start_load(_plan(config, target, prepared, manifest, out), distribution, out))
    finally:
        progress.close()
        health.finish()
        if follow_up is not None:
            follow_up.finish()
        telemetry.finish()
    _complete(manifest, watch, target, out, telemetry)
    result = load_run(out)
    if signals.first is not None:
        raise InterruptedRun(signals.first, result)
    if watch.failure is not None:
        raise WorkerError(watch.failure)
    if watch.end is None:
        raise WorkerError(
            f"the load generator's process ended early (exit code {watch.exit_code}); what it measured is in {out}\n"
            + log_tail(out)
        )
    return result


def _stop_rules(config: BenchConfig) -> "tuple[StopRule, ...]":
    """The rules that need statistics, which are imported only for them. Raises UsageError."""
    if not config.has_stop_rules:
        return ()
    from loadgen.stop_rules import stop_rules_of

    return stop_rules_of(config)


def _follow_up(
    config: BenchConfig, manifest: RunManifest, out: Path, on_stop: Callable[[str], None]
) -> "FollowUp | None":
    rules = _stop_rules(config)
    if not rules:
        return None
    from loadgen.follow_up import FollowUp

    return FollowUp(manifest, out, rules, on_stop)


def make_run_directory(out: Path) -> None:
    """Create the directory. Raises UsageError when it cannot be or holds a run, MeasurementError on a full disk."""
    if (out / "manifest.json").exists():
        raise UsageError(f"{out} holds a run already; give another --out or remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(out).free
    except OSError as error:
        raise UsageError(f"`out` is {str(out)!r}: {error.strerror}") from error
    if free_bytes < LEAST_FREE_BYTES:
        raise MeasurementError(
            f"{out} has {free_bytes / 2**20:.0f} MiB free, and a run wants {LEAST_FREE_BYTES // 2**20} MiB"
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before the first request."""

    facts: ServerFacts
    work: Workload
    vocabulary: Vocabulary | None
    counter: TokenCounter | None
    answer_tokens: list[int | None] | None
    round_trip: RoundTrip | None
    length_control: str


def _prepare(config: BenchConfig, target: Target, progress: Progress) -> Prepared:
    facts = target.facts(config.api, config.model)
    length_control = choose_length_control(config, facts)
    control = target.control()
    try:
        vocabulary, counter = _vocabulary(config, control)
        answer_tokens = _answer_tokens(config, control)
        work = workload.build(config, vocabulary, facts.limits, answer_tokens)
        round_trip = verify(work.first(16), counter) if counter is not None else None
    finally:
        control.close()
    if length_control == "capped":
        progress.say("answer lengths are capped, not forced: the server ends an answer where the model does")
    if round_trip is not None and not round_trip.is_exact:
        progress.say(f"prompt lengths are off by up to {round_trip.largest_error} tokens with this tokenizer")
    if work.times_ns is not None and not work.times_ns:
        raise UsageError("the schedule has no requests: the duration is shorter than the first arrival")
    return Prepared(facts, work, vocabulary, counter, answer_tokens, round_trip, length_control)


def _vocabulary(config: BenchConfig, control: ControlClient) -> tuple[Vocabulary | None, TokenCounter | None]:
    if not workload.needs_vocabulary(config):
        return None, None
    counter = open_counter(config, control)
    return make_vocabulary(counter), counter


def _answer_tokens(config: BenchConfig, control: ControlClient) -> list[int | None] | None:
    if not workload.needs_answer_lengths(config):
        return None
    try:
        return workload.answer_lengths(config, open_counter(config, control).count)
    except TargetError as error:
        raise UsageError(f"{error}; give --tokenizer to count the answers, or --output-tokens") from error


def _warm(work: Workload, target: Target, facts: ServerFacts, progress: Progress) -> None:
    """Send every shared prefix once, before anything is counted. Raises TargetError when one fails."""
    prefixes = work.shared_prefixes()
    progress.say(f"warming the prefix cache with {len(prefixes)} prefixes")
    for prefix in prefixes:
        target.generate_once(facts.api, facts.model, prefix)


def choose_length_control(config: BenchConfig, facts: ServerFacts) -> str:
    """`forced` where the server says that it understands; `capped` where it does not. Raises UsageError."""
    if config.length_control == "forced" and not facts.can_force_length:
        raise UsageError(
            "`length_control` is 'forced' but the server does not list ignore_eos_token and min_new_tokens among its "
            "extensions in /info; use 'capped' or 'auto'"
        )
    if config.length_control == "capped" or not facts.can_force_length:
        return "capped"
    asks_for_length = config.workload != "prompts" or config.output_tokens is not None
    return "forced" if asks_for_length else "capped"


def _manifest(
    config: BenchConfig,
    target: Target,
    prepared: Prepared,
    out: Path,
    command: Sequence[str],
    distribution: Distribution,
) -> RunManifest:
    facts, counter, round_trip = prepared.facts, prepared.counter, prepared.round_trip
    return RunManifest(
        run_id=out.name or new_run_id(),
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        command=redacted_argv(command),
        config=config.resolved() | {"api": facts.api},
        mode=config.mode,
        label=config.label,
        version=machine.product_version(),
        revision=machine.source_revision(),
        python=sys.version.split()[0],
        libraries=machine.library_versions(),
        machine=machine.describe_machine(),
        workers=distribution.count,
        seed=config.seed,
        workload_hash=prepared.work.digest,
        schedule_hash=prepared.work.schedule_hash,
        tokenizer_hash=counter.digest if counter is not None else None,
        length_control=prepared.length_control,
        prefix_cache=config.prefix_cache,
        objectives=objectives_of(config.slo),
        price_per_hour=config.cost_per_hour,
        target={
            "url": target.url,
            "api": facts.api,
            "model": facts.model,
            "info": redacted(facts.info),
            "config": redacted(facts.config),
            "launch_argv": redacted_argv(target.launch_argv) if target.launch_argv is not None else None,
            "launch_chosen": list(target.launch_chosen),
            "token_counter": counter.source if counter is not None else None,
            "prompts_verified": round_trip.checked if round_trip is not None else 0,
            "prompt_length_error": round_trip.largest_error if round_trip is not None else None,
        },
        warmup_s=config.warmup_s,
        slots=config.concurrency if config.mode == "closed" and config.warmup_s else None,
    )


def _plan(config: BenchConfig, target: Target, prepared: Prepared, manifest: RunManifest, out: Path) -> WorkerPlan:
    return WorkerPlan(
        run_id=manifest.run_id,
        directory=str(out.resolve()),
        parent_pid=os.getpid(),
        url=target.url,
        api=prepared.facts.api,
        config=config.model_dump(mode="json", exclude={"api_key"}),
        sampling=Sampling(
            prepared.length_control == "forced", config.temperature, config.seed, prepared.facts.model, config.stream
        ),
        limits=dataclasses.asdict(prepared.facts.limits),
        vocabulary=dataclasses.asdict(prepared.vocabulary) if prepared.vocabulary is not None else None,
        answer_tokens=prepared.answer_tokens,
        headers=target.headers,
        workload_hash=prepared.work.digest,
        schedule_hash=prepared.work.schedule_hash,
    )


class _Watch:
    """Reads what the worker says until it ends; passes requests to finish on to it."""

    def __init__(self, progress: Progress, telemetry: Telemetry) -> None:
        self._progress = progress
        self._telemetry = telemetry
        self._worker: subprocess.Popen[bytes] | None = None
        self.is_asked_to_finish = False
        self.health: HealthProbe | None = None
        self.follow_up: FollowUp | None = None
        self.asked_reason: str | None = None
        self.started: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        self.failure: str | None = None

    @property
    def exit_code(self) -> int | None:
        return self._worker.returncode if self._worker is not None else None

    def ask_to_finish(self) -> None:
        self.is_asked_to_finish = True
        if self._worker is not None:
            self._worker.terminate()

    def stop_unhealthy(self) -> None:
        """End the load of a server that does not answer its probes."""
        self._progress.say("the server does not answer /health any more; ending the load")
        self.stop("server_unhealthy")

    def stop(self, reason: str) -> None:
        """End the load, whose manifest will give this reason."""
        self.asked_reason = self.asked_reason or reason
        if self._worker is not None:
            self._worker.send_signal(UNHEALTHY_SIGNAL)

    def kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()

    def follow(self, worker: "subprocess.Popen[bytes]") -> None:
        self._worker = worker
        assert worker.stdout is not None
        try:
            if self.is_asked_to_finish:
                worker.terminate()
            for line in worker.stdout:
                self._take(json.loads(line))
            worker.wait()
        except BaseException:
            worker.kill()
            worker.wait()
            raise
        finally:
            worker.stdout.close()

    def _take(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "started":
                self.started = message
                self._telemetry.begin_run(message["start_ns"])
                if self.health is not None:
                    self.health.start()
                if self.follow_up is not None:
                    self.follow_up.start()
            case "progress":
                self._progress.update(message)
            case "say":
                self._progress.say(message["text"])
            case "failed":
                self.failure = message["text"]
            case "done":
                self.end = message


def _complete(manifest: RunManifest, watch: _Watch, target: Target, out: Path, telemetry: Telemetry) -> None:
    """Write the manifest's second half and turn the files into their final form."""
    end = watch.end or {"stop_reason": "interrupted" if watch.is_asked_to_finish else "worker_lost"}
    manifest.window_end_s = end.get("window_end_s")
    manifest.drain_s = end.get("drain_s")
    manifest.stop_reason = end.get("stop_reason")
    if manifest.stop_reason == ASKED_TO_STOP:
        manifest.stop_reason = watch.asked_reason or ASKED_TO_STOP
    manifest.clipped = end.get("clipped") or {}
    manifest.target["info_end"] = redacted(target.info())
    if target.process is not None:
        manifest.target["server_exit_code"] = target.process.exit_code
    if watch.started:
        started = watch.started
        zero_s = started["wall_s"] - (started["at_ns"] - started["start_ns"]) / 1e9
        manifest.clock = {
            "wall_at_start_s": zero_s,
            "monotonic_at_start_s": started["start_ns"] / 1e9,
            "offset_s": end.get("clock_offset_s", 0.0),
            "offset_uncertainty_s": end.get("clock_error_s", 0.0),
        }
    write_manifest(out, manifest)
    client = _read_client(out)
    write_client(
        out,
        client
        | {
            "server_requests": telemetry.server_requests,
            "capacity_events_per_s": stored_capacity(),
            "lost_workers": len(end.get("lost") or ()) or int(watch.end is None and not watch.is_asked_to_finish),
            "write_errors": int(client.get("write_errors") or 0) + telemetry.write_errors,
        },
    )
    finish_run(out)
    log = out / WORKER_LOG
    if log.exists() and not log.stat().st_size:
        log.unlink()


def _read_client(out: Path) -> dict[str, Any]:
    """What the worker wrote of itself; empty when it did not come to that."""
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
