"""`tgi-tune simulate run` and `explain`: the metrics, the run directory and the time by phase of one configuration."""

import argparse
import json
import textwrap
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from reports.run_schema import Phase, RequestRecord, Status
from reports.run_store import REQUESTS as REQUESTS_TABLE
from reports.run_store import JsonlWriter, RunManifest, write_client, write_manifest
from tuner.commands.simulation.simulate_inputs import (
    METRICS,
    add_input_flags,
    exit_code,
    load_for,
    note_of,
    outside_problem,
    read_inputs,
    render_table,
    settings_from,
)
from tuner.simulator.predict import run as run_simulation
from tuner.simulator.replica_state import Flight
from tuner.simulator.simulated_metrics import metrics_of
from tuner.simulator.simulation import NS_PER_S, Simulated

LABEL = "simulated"
# With a smaller fraction of waiting time, the number of users limits the throughput.
LEAST_WAITING = 0.05


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    add_input_flags(parser)
    parser.add_argument(
        "--no-stride",
        action="store_true",
        help="Simulate each decode step separately instead of several at once. Slower.",
    )


def run(args: argparse.Namespace) -> int:
    costs, config, base = read_inputs(args)
    chosen = settings_from(args.set)
    server = base.with_settings(chosen, costs.pool)
    load = load_for(args, config, server, costs)
    simulated = run_simulation(
        server, costs.of(server.settings), load, with_gaps=args.out is not None, with_strides=not args.no_stride
    )
    metrics = metrics_of(simulated, METRICS)
    costs = costs.only(server.settings)
    outside = outside_problem(costs, server, simulated)
    note = note_of(costs, is_forced=args.force, outside=outside)
    if args.out is not None:
        write_run(args.out, simulated, config, {"cost": note or "measured", **chosen})
    if args.json:
        result = {"settings": chosen, "metrics": metrics, "bounded_by": bounded_by(simulated), "note": note}
        print(json.dumps(result, indent=2))
    else:
        seconds = max((flight.end_ns for flight in simulated.flights), default=0) / NS_PER_S
        from loadgen.commands.present import COLUMNS

        print(f"simulated {len(simulated.flights)} requests over {seconds:.1f} s")
        print(render_table([metrics]))
        if note:
            print(textwrap.fill(note, COLUMNS))
    return exit_code(costs, is_forced=args.force, outside=outside)


def explain(args: argparse.Namespace) -> int:
    costs, config, base = read_inputs(args)
    server = base.with_settings(settings_from(args.set), costs.pool)
    simulated = run_simulation(server, costs.of(server.settings), load_for(args, config, server, costs))
    found = time_by_cause(simulated)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{name:<28}{value:.4g}" for name, value in found.items()))
    outside = outside_problem(costs, server, simulated)
    return exit_code(costs.only(server.settings), is_forced=args.force, outside=outside)


def time_by_cause(simulated: Simulated) -> dict[str, float]:
    """The server's time by phase as fractions, a request's mean time by phase in seconds, and other means."""
    counts = simulated.replicas[0].counts
    total_ns = max((flight.end_ns for flight in simulated.flights), default=1) or 1
    done = [flight for flight in simulated.flights if flight.status == "ok"]
    count = max(len(done), 1)
    return {
        "prefill_share": counts.prefill_ns / total_ns,
        "decode_share": counts.decode_ns / total_ns,
        "idle_share": 1 - (counts.prefill_ns + counts.decode_ns) / total_ns,
        "rows_per_decode": counts.row_steps / max(counts.decodes, 1),
        "prompt_tokens_per_prefill": counts.prompt_tokens / max(counts.prefills, 1),
        "kv_tokens_peak": counts.kv_peak,
        "cached_tokens_share": counts.cached_tokens / max(counts.cached_tokens + counts.prompt_tokens, 1),
        "waiting_s": sum(flight.started_ns - flight.sent_ns for flight in done) / count / NS_PER_S,
        "prefill_s": sum(flight.first_ns - flight.started_ns for flight in done) / count / NS_PER_S,
        "decode_s": sum(flight.end_ns - flight.first_ns for flight in done) / count / NS_PER_S,
        **{f"waiting_{cause}_share": share for cause, share in simulated.replicas[0].waiting_fractions().items()},
    }


def bounded_by(simulated: Simulated) -> str:
    """The main cause of waiting; `users` if requests wait less than the `LEAST_WAITING` fraction."""
    fractions = simulated.replicas[0].waiting_fractions()
    cause = max(fractions, key=lambda name: fractions[name], default="users")
    return cause if fractions.get(cause, 0.0) > LEAST_WAITING else "users"


def write_run(directory: Path, simulated: Simulated, config: BenchConfig, facts: dict[str, Any]) -> Path:
    """Write a run directory like that of a measured run. `facts`: labels of its manifest. Its clock starts at 1970."""
    from reports.metrics.finish_run import finish_run

    directory.mkdir(parents=True, exist_ok=True)
    run_id = directory.name
    manifest = RunManifest(
        run_id,
        started_at=datetime.fromtimestamp(0, UTC).isoformat(),
        config=config.resolved(),
        mode=config.mode,
        open_loop=config.is_open_loop,
        label=LABEL,
        labels={"simulated": "true", **{name: str(value) for name, value in facts.items()}},
        seed=config.seed,
        warmup_s=simulated.start_ns / NS_PER_S,
        slots=config.users if not config.is_open_loop else None,
        window_end_s=simulated.end_ns / NS_PER_S,
        stop_reason="duration",
    )
    write_manifest(directory, manifest)
    write_client(directory, {})
    with JsonlWriter(directory / f"{REQUESTS_TABLE}.jsonl") as writer:
        for flight in sorted(simulated.flights, key=lambda each: each.id):
            writer.write(_record(flight, run_id, simulated).to_json())
    finish_run(directory)
    return directory


def _record(flight: Flight, run_id: str, simulated: Simulated) -> RequestRecord:
    """The record of a request, in the load generator's format."""
    is_ok = flight.status == "ok"
    times = flight.token_ns
    return RequestRecord(
        run_id,
        f"{run_id}-{flight.id}",
        prompt_id=str(flight.id),
        phase=Phase.WARMUP if flight.intended_ns < simulated.start_ns else Phase.MEASURE,
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
