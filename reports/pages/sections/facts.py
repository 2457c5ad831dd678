"""The setup of a run: server, load and machine, from the manifest."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from reports.document import Block, Facts, Table, format_number
from reports.metrics.summary import Analysis
from reports.run_store import RunManifest

SHORT_REVISION = 12


def run_facts(analysis: Analysis) -> Facts:
    """Server, load and machine of a run; unknown facts are left out."""
    manifest = analysis.run.manifest
    title = f"Server · {manifest.label}" if manifest.label else "Server"
    groups = {title: _server(manifest), "Load": _load(analysis), "Machine": _machine(manifest)}
    return Facts(
        tuple(
            (name, tuple((fact, str(value)) for fact, value in facts.items() if value not in (None, "")))
            for name, facts in groups.items()
        )
    )


def facts_of_runs(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    """The facts of one run; for several runs the common facts, and a table of their differences."""
    if len(analyses) == 1:
        return (run_facts(analyses[0]),)
    each = [_by_name(run_facts(analysis)) for analysis in analyses]
    names = list(dict.fromkeys(name for facts in each for name in facts))
    shared = [name for name in names if len({facts.get(name) for facts in each}) == 1]
    groups = dict.fromkeys(group for group, _ in shared)
    common = Facts(
        tuple((group, tuple((name, each[0][group, name]) for own, name in shared if own == group)) for group in groups)
    )
    rows: list[dict[str, str | None]] = [
        {"run": analysis.label, **{name[1]: facts.get(name) for name in names if name not in shared}}
        for analysis, facts in zip(analyses, each, strict=True)
    ]
    return (
        (common, Table("Differences between the runs", pd.DataFrame(rows))) if len(shared) < len(names) else (common,)
    )


def _by_name(facts: Facts) -> dict[tuple[str, str], str]:
    """Values by group and name; the name of the server's group is without the run's label."""
    return {(title.partition(" · ")[0], name): value for title, pairs in facts.groups for name, value in pairs}


def load_sentence(manifest: RunManifest) -> str:
    """The load in one line: `closed loop, 16 users`, `open loop, poisson, 8 requests/s`."""
    if manifest.mode == "closed":
        users = manifest.config.get("concurrency") or manifest.slots
        return f"closed loop, {users} user{'s' if users != 1 else ''}" if users else "closed loop"
    if not manifest.is_open_loop and manifest.mode == "stages":
        return f"closed loop, users {manifest.config.get('stages')}"
    rate = manifest.config.get("rate")
    return f"open loop, {manifest.mode}" + (f", {rate:g} requests/s" if isinstance(rate, int | float) else "")


def start_time(manifest: RunManifest) -> str:
    """The start, to the minute; a value that is not an ISO time is returned unchanged."""
    try:
        started = datetime.datetime.fromisoformat(manifest.started_at)
    except ValueError:
        return manifest.started_at
    return started.strftime("%Y-%m-%d %H:%M") + (" UTC" if started.utcoffset() == datetime.timedelta(0) else "")


def _server(manifest: RunManifest) -> dict[str, Any]:
    target = manifest.target
    info: Mapping[str, Any] = target.get("info") or {}
    engine: Mapping[str, Any] = info.get("engine") or {}
    return {
        "model": manifest.model,
        "precision": _joined(info.get("model_dtype") or engine.get("dtype"), engine.get("quantize")),
        "device": info.get("model_device_type") or engine.get("backend"),
        "attention": _attention(engine),
        "version": _joined(info.get("version"), _short(info.get("sha")), info.get("docker_label")),
        "address": _joined(target.get("url"), *(target.get("replicas") or ())),
        "balance": manifest.config.get("balance") if target.get("replicas") else None,
        "API": target.get("api"),
        "kind": _kind(target),
        "server metrics": target.get("server_metrics"),
        "cache reset": target.get("cache_reset"),
        "connections": "a new one for each request" if target.get("reuses_connections") is False else None,
        "limits": _limits(info),
        "tuned": engine.get("tuned"),
        "launched with": " ".join(map(str, target.get("launch_argv") or [])),
        "start-up": _start_up(target.get("start_up")),
        "added by tgi-bench": " ".join(map(str, target.get("launch_chosen") or [])),
    }


def _kind(target: Mapping[str, Any]) -> str | None:
    """The kind of server, and the reason for this classification."""
    reason = target.get("engine_detected_by")
    return f"{target['engine']} ({reason})" if reason else target.get("engine")


def _start_up(times: Mapping[str, Any] | None) -> str | None:
    """The times of the launch, with the share of the model's files that was in the page cache."""
    if not times:
        return None
    shown = f"ready after {times['ready_s']:.2f} s, first token after {times['first_token_s']:.2f} s"
    cache = times.get("file_cache")
    if not cache or cache["cached_share"] is None:
        return shown
    return (
        f"{shown}; {cache['state']} file cache: {cache['cached_share']:.0%} of {cache['bytes'] / 2**20:.1f} MiB cached"
    )


def _imported(source: Mapping[str, Any] | None) -> str | None:
    """The tool and the file of an imported run, and the data that the file lacks."""
    if not source:
        return None
    return (
        f"{source['tool']} {source['version']}".strip() + f", {source['file']}; not in it: {'; '.join(source['lacks'])}"
    )


def _load(analysis: Analysis) -> dict[str, Any]:
    manifest, window = analysis.run.manifest, analysis.measured.window
    config = manifest.config
    requests = manifest.clipped.get("requests", 0)
    tokens = manifest.clipped.get("input_tokens", 0) + manifest.clipped.get("output_tokens", 0)
    return {
        "profile": config.get("profile"),
        "mode": load_sentence(manifest),
        "imported": _imported(manifest.target.get("imported")),
        "workload": config.get("workload"),
        "trace": _trace(config),
        "input tokens": config.get("input_tokens"),
        "output tokens": config.get("output_tokens"),
        "length control": manifest.length_control,
        "prompt lengths": manifest.target.get("prompt_lengths"),
        "clipped": f"{requests:,} requests, {tokens:,} tokens" if requests else "none",
        "prefix cache": manifest.prefix_cache,
        "cached, % of prompt tokens": _cached(analysis.summary["cached"]),
        "marker tokens": (manifest.target.get("prefix_cache") or {}).get("marker_tokens") or None,
        "seed": manifest.seed,
        "arrival times": _arrival_times(manifest.arrival_times),
        "window": f"{window.start_s:.1f} s to {window.end_s:.1f} s",
        "drain limit": None if window.drain_s is None else f"{window.drain_s:g} s",
        "warm-up ended by": window.warmup_rule,
        "stopped by": window.stop_reason,
    }


def _cached(cached: Mapping[str, Any]) -> str | None:
    """The measured share and, in brackets, the planned share, in percent."""
    if cached["measured"] is None and cached["planned"] is None:
        return None
    measured, planned = (
        "unknown" if cached[name] is None else f"{100 * cached[name]:.1f}" for name in ("measured", "planned")
    )
    return f"{measured} ({planned})"


def _arrival_times(counts: Mapping[str, Any]) -> str | None:
    """The source of the times of received bytes, with the share of reads that have a timestamp of the kernel."""
    if not counts:
        return None
    reads = counts["stamped"] + counts["unstamped"] + counts["rejected"]
    if counts["source"] == "read" or not reads:
        return "time of the read; the system has no arrival times"
    rejected = f", {counts['rejected']:,} rejected (clock step)" if counts["rejected"] else ""
    return f"kernel timestamps for {100 * counts['stamped'] / reads:.1f} % of the reads{rejected}"


def _trace(config: Mapping[str, Any]) -> str | None:
    if not config.get("trace_file"):
        return None
    limit, scale = config.get("trace_limit"), config.get("time_scale")
    first = f"first {limit:,} requests" if isinstance(limit, int) else None
    times = f"times × {scale:g}" if isinstance(scale, int | float) and scale != 1 else None
    return _joined(config["trace_file"], first, times)


def _machine(manifest: RunManifest) -> dict[str, Any]:
    machine = manifest.machine
    memory, cores = machine.get("memory_bytes"), machine.get("cpu_count")
    return {
        "system": _joined(machine.get("os"), machine.get("kernel")),
        "CPU": _joined(machine.get("cpu"), f"{cores} cores" if cores else None),
        "memory": f"{format_number(memory / 2**30)} GiB" if memory else None,
        "accelerator": manifest.target.get("accelerator"),
        "started": start_time(manifest),
        "tgi-bench": _joined(manifest.version, _short(manifest.revision)),
        "Python": manifest.python,
        "workers": manifest.workers,
        "notes": manifest.notes,
    }


def _short(revision: Any) -> str | None:
    """The first digits of a commit, with the suffix of a tree with local changes."""
    if not revision:
        return None
    commit, _, changed = str(revision).partition("-")
    return commit[:SHORT_REVISION] + (f"-{changed}" if changed else "")


def _joined(*parts: Any) -> str | None:
    return ", ".join(str(part) for part in parts if part) or None


def _limits(info: Mapping[str, Any]) -> str | None:
    names = {"max_concurrent_requests": "requests", "max_input_tokens": "input", "max_total_tokens": "total tokens"}
    return _joined(*(f"{info[name]:,} {title}" for name, title in names.items() if isinstance(info.get(name), int)))


def _attention(engine: Mapping[str, Any]) -> str | None:
    chosen = engine.get("attention")
    if isinstance(chosen, Mapping):
        return _joined(*(f"{phase}: {kernel}" for phase, kernel in chosen.items()))
    return None if chosen is None else str(chosen)
