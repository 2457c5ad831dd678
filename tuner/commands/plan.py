"""`tgi-tune plan`: computes the number of replicas and the cost for each rate and balancing policy of a plan file."""

import argparse
import csv
import itertools
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.program import Command
from loadgen.progress import ProgressDisplay, add_verbosity_flags, progress_of
from loadgen.terminal.progress_line import Position
from tuner.commands.simulation.simulate_inputs import (
    TOO_POOR,
    load_values,
    newest_cost,
    note_of,
    server_of,
    settings_from,
)
from tuner.config import LimitSection
from tuner.simulator.capacity_planning.attainment import FleetVerdict
from tuner.simulator.capacity_planning.fleet import POLICIES, Fleet
from tuner.simulator.capacity_planning.fleet_size import RUNS, LatencySlo, SizedFleet, size_fleet
from tuner.simulator.capacity_planning.replica_schedule import ReplicaSchedule, replica_schedule
from tuner.simulator.fitting.cost_file import Costs, read_costs
from tuner.simulator.load import load_of
from tuner.simulator.predict import law_of
from tuner.simulator.simulated_metrics import LATENCY
from tuner.simulator.simulation import PlannedRequest
from tuner.simulator.step_ranges import RangeUse

SECONDS_PER_HOUR = 3600


class RateProfileSection(BaseModel):
    """`[plan.rate_profile]`: the rate of each hour of a day, and the start delay and dwell time of a replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rates: tuple[float, ...] = Field(
        min_length=24, max_length=24, description="Requests per second in each of the 24 hours of a day."
    )
    start_delay_s: float = Field(
        0.0, ge=0, description="Time from the start of a replica until it is ready, in seconds."
    )
    min_dwell_s: float = Field(
        0.0, ge=0, description="Shortest time that a replica runs before it is stopped, in seconds."
    )


class PlanSection(BaseModel):
    """`[plan]`: rates, limits, policies and price."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rates: tuple[float, ...] = Field((), description="Request rates to plan for, in requests per second.")
    rate_profile: RateProfileSection | None = Field(
        None, validation_alias=AliasChoices("rate_profile", "day"), description="The rate of each hour of a day."
    )
    attainment: float = Field(0.95, gt=0, lt=1, description="Smallest fraction of requests that must meet every limit.")
    policies: tuple[str, ...] = Field(
        ("round_robin", "two_choices"), description=f"Balancing policies to compare: {', '.join(POLICIES)}."
    )
    spare: int = Field(0, ge=0, description="Number of replicas that can fail without a missed SLO.")
    price_per_replica_hour: float | None = Field(
        None, gt=0, description="Price of a replica per hour, in any currency. Adds the cost columns."
    )
    limit: tuple[LimitSection, ...] = Field(
        min_length=1, description="Limits of request latencies: [[plan.limit]], each with `max`."
    )

    @model_validator(mode="after")
    def _known(self) -> "PlanSection":
        for policy in self.policies:
            if policy not in POLICIES:
                raise ValueError(f"`policies` has {policy!r}, but must be of {', '.join(POLICIES)}")
        for limit in self.limit:
            if LATENCY.fullmatch(limit.metric) is None or limit.max is None:
                raise ValueError(f"`limit` has `{limit.metric}`, but must be a request latency with `max`")
        if not self.rates and self.rate_profile is None:
            raise ValueError("set `rates`, or [plan.rate_profile]")
        if any(rate <= 0 for rate in self.to_size[0]):
            raise ValueError("`rates` must be above 0")
        return self

    @property
    def to_size(self) -> tuple[tuple[float, ...], list[tuple[float, str]]]:
        """Every rate, and the pairs of rate and policy to size.

        `rates` are sized with every policy, rates of the profile with the first policy.
        """
        hourly = self.rate_profile.rates if self.rate_profile is not None else ()
        pairs = [(rate, policy) for rate in self.rates for policy in self.policies]
        pairs += [(rate, self.policies[0]) for rate in sorted(set(hourly)) if rate not in self.rates]
        return (*self.rates, *hourly), pairs

    @property
    def limit_texts(self) -> tuple[str, ...]:
        return tuple(f"{limit.metric} <= {limit.max:g}" for limit in self.limit)

    @property
    def slo(self) -> LatencySlo:
        limits = {limit.metric.split("_")[0]: float(limit.max or 0) for limit in self.limit}
        return LatencySlo(limits, self.attainment)


class PlanFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: PlanSection


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan", type=Path, metavar="PLAN.toml", help="Plan file: rates, limits and policies (docs/plan.md)."
    )
    parser.add_argument(
        "--cost", type=Path, metavar="FILE", help="File of step costs. Default: that of the newest study."
    )
    parser.add_argument(
        "--load",
        type=Path,
        metavar="FILE",
        help="Load file, for the lengths of prompts and answers. Default: load.toml in the folder of the costs.",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="Setting of the launcher. Repeatable."
    )
    parser.add_argument(
        "--effort",
        type=float,
        default=1.0,
        metavar="X",
        help="Factor of the simulated time. A larger one decides more fleets near the limit. Default 1.",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of the prompts and arrivals. Default 0.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Write plan.csv and a report to this folder.")
    parser.add_argument(
        "--force", action="store_true", help="Plan even if the cost model is too inaccurate, and add a note."
    )
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    add_verbosity_flags(parser)


def plan(args: argparse.Namespace, _words: Sequence[str]) -> int:
    """Size a fleet for each rate and policy. Exit code 3 if the cost model is too poor for it."""
    section = parsing.load(PlanFile, parsing.read_toml(args.plan)).plan
    path = args.cost or newest_cost()
    costs = read_costs(path)
    chosen = settings_from(args.set)
    config = parsing.load(BenchConfig, {**load_values(args.load, path), "mode": "closed", "seed": args.seed})
    server = server_of(costs, chosen).with_settings(chosen, costs.pool).for_load(config)
    costs = costs.only(server.settings)
    if costs.is_poor and not args.force:
        print(f"no plan: {costs.problem}; plan anyway with --force")
        return TOO_POOR
    is_cached = server.uses_prefix_caching
    # A fleet that is just sufficient by exact predictions would be too small.
    law = law_of(server, costs.with_errors().of(server.settings))
    fleet = Fleet(
        server.rule,
        law,
        partial(_requests, config, is_cached),
        server.max_concurrent_requests,
        first_seed=RUNS * args.seed,
    )
    sized = _size_fleets(fleet, section, args.effort, progress_of(args))
    outside = RangeUse.joined(each.at.ranges for each in sized).problem(costs.of(server.settings).ranges)
    if outside is not None and not args.force:
        print(f"no plan: {outside}; plan anyway with --force")
        return TOO_POOR
    level = _level_error(costs)
    note = "; ".join(filter(None, (note_of(costs, is_forced=args.force, outside=outside), _undecided(sized))))
    rows = [_row(each, section.price_per_replica_hour, level) for each in sized]
    schedule = _schedule(section, sized)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "plan.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        write_plan_report(args.out, section, sized, rows, schedule, note)
    if args.json:
        content: dict[str, Any] = {"note": note, "rows": rows}
        if schedule is not None:
            hours = {"hours": schedule.hours, "static_hours": schedule.static_hours}
            content["rate_profile"] = {**asdict(schedule), **hours}
        print(json.dumps(content, indent=2))
    else:
        from loadgen.commands.present import COLUMNS
        from tuner.commands.plan_text import plan_text

        print(plan_text(rows, section.limit_texts, section.attainment))
        if schedule is not None:
            print(
                f"a day: {schedule.hours:.1f} replica-hours; {schedule.static_hours:.0f} with a fleet of constant size"
            )
        if note:
            print(textwrap.fill(note, COLUMNS))
    return 0


def _size_fleets(fleet: Fleet, section: PlanSection, effort: float, progress: ProgressDisplay) -> list[SizedFleet]:
    """The fleet of each rate and policy, with a line for each of them."""
    pairs = section.to_size[1]
    progress.show(f"sizing {len(pairs)} fleets by simulation")
    sized = []
    try:
        for number, (rate, policy) in enumerate(pairs, start=1):
            position = Position("fleet", number, len(pairs), f"{rate:g} requests/s", idle="simulating")
            progress.place(position)
            sized.append(size_fleet(fleet, section.slo, rate, policy, spare=section.spare, effort=effort))
            count = sized[-1].at.replicas
            progress.show(f"{position}, {policy}: {count} {'replica' if count == 1 else 'replicas'}")
    finally:
        progress.place(None)
    return sized


def _undecided(sized: Sequence[SizedFleet]) -> str:
    """A note on fleets that may be larger than needed; empty if there is none."""
    undecided = [each for each in sized if each.below is not None and each.below.verdict is FleetVerdict.NOT_SHOWN]
    if not undecided:
        return ""
    return (
        f"for {len(undecided)} of {len(sized)} fleets, the simulated time does not decide whether one replica less "
        "meets the target: a higher --effort may find a smaller fleet"
    )


def _schedule(section: PlanSection, sized: Sequence[SizedFleet]) -> ReplicaSchedule | None:
    """The replicas of each hour with the first policy, including spares."""
    profile = section.rate_profile
    if profile is None:
        return None
    replicas = {each.rate: each.with_spare for each in sized if each.policy == section.policies[0]}
    needed = [replicas[rate] for rate in profile.rates]
    return replica_schedule(needed, start_delay_s=profile.start_delay_s, min_dwell_s=profile.min_dwell_s)


def write_plan_report(
    directory: Path,
    section: PlanSection,
    sized: Sequence[SizedFleet],
    rows: Sequence[Mapping[str, Any]],
    schedule: ReplicaSchedule | None,
    note: str,
) -> None:
    """Write the report of a plan: table, curves and rate profile."""
    import pandas as pd

    from reports.pages.simulation_page import PlanData, build_plan_report
    from reports.renderers.write import write_report

    price = section.price_per_replica_hour
    table = pd.DataFrame(rows)
    ends = table.pop("range").str.split("-", expand=True).astype(int)
    fleets = [
        {"rate": each.rate, "policy": each.policy, "attainment": at.attainment, "cost": at.replicas * (price or 1.0)}
        for each in sized
        for at in (each.below, each.at)
        if at is not None
    ]
    hours = None
    facts: tuple[tuple[str, str], ...] = ()
    if schedule is not None:
        needed = schedule.needed
        hours = pd.DataFrame({"hour": range(len(needed)), "needed": needed, "running": schedule.running})
        hours = hours.assign(static=max(needed))
        facts = (("replica-hours of starting replicas", f"{schedule.starting_hours:.2f}"),)
        if price is not None:
            facts += (("cost of the day", f"{price * schedule.hours:.2f}"),)
            facts += (("cost of the day with a fleet of constant size", f"{price * schedule.static_hours:.2f}"),)
    plan = PlanData(
        "Capacity plan",
        table.assign(low=ends[0], high=ends[1]),
        pd.DataFrame(fleets),
        "replicas" if price is None else "cost per hour",
        section.attainment,
        section.limit_texts,
        hours,
        facts,
        note,
    )
    write_report(build_plan_report(plan), directory)


def _requests(config: BenchConfig, with_ids: bool, seed: int) -> Iterator[PlannedRequest]:
    """The requests of the load, with `seed` added to its seed. A workload that ends is repeated."""
    planned = load_of(config.model_copy(update={"seed": config.seed + seed}), with_ids=with_ids).planned
    return itertools.chain.from_iterable(itertools.repeat(planned))


def _level_error(costs: Costs) -> float:
    """Relative uncertainty of predicted times: the largest median error of held-out steps or loads."""
    errors = [model.errors.median for model in costs.models.values() if model.errors is not None]
    return max((median for each in errors for median in each.values()), default=0.0)


def _row(sized: SizedFleet, price: float | None, level: float) -> dict[str, Any]:
    at, below, count = sized.at, sized.below, sized.at.replicas
    low, high = math.ceil(count * (1 - level)), math.ceil(count * (1 + level))
    row: dict[str, Any] = {
        "rate": sized.rate,
        "policy": sized.policy,
        "replicas": count,
        "range": f"{low}-{high}",
        "with_spare": sized.with_spare,
        "attainment": round(at.attainment, 4),
        "attainment_at_least": round(at.lower, 4),
        "requests": at.requests,
        "attainment_one_lost": None if below is None else round(below.attainment, 4),
        "one_lost": "no replica is left" if below is None else str(below.verdict),
        "ttft_p50_ms": round(at.ttft_p50_ms, 2),
        "ttft_p95_ms": round(at.ttft_p95_ms, 2),
        "tpot_mean_ms": round(at.tpot_mean_ms, 3),
        "utilisation": round(at.utilisation, 3),
        "requests_per_replica": round(at.requests_per_replica, 2),
    }
    if price is not None:
        per_hour = price * sized.with_spare
        row["cost_per_hour"] = round(per_hour, 4)
        row["cost_per_mtok"] = round(per_hour / (at.output_tokens_per_s * SECONDS_PER_HOUR) * 1e6, 4)
    return row


EXAMPLES = ("plan.toml", "plan.toml --cost studies/nightly/cost.json --out plan", "plan.toml --effort 4 --json")
COMMAND = Command("Compute the number of replicas that rates and latency limits need.", add_plan_flags, plan, EXAMPLES)
