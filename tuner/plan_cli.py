"""`tgi-tune plan`: replicas for each rate and policy of a plan file, with cost."""

import argparse
import csv
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loadgen import settings
from loadgen.config import BenchConfig
from tuner.config import LimitSection
from tuner.costs import read_costs
from tuner.day import Day, day_of
from tuner.errors import TunerError
from tuner.forecast import load_of
from tuner.plan import POLICIES, Fleet, Promise, Sized, size_fleet
from tuner.prepare import DEFAULT_LOAD
from tuner.simulate import Ask
from tuner.simulate_inputs import TOO_POOR, newest_cost, note_of, server_of, settings_from
from tuner.simulated_metrics import LATENCY

SECONDS_PER_HOUR = 3600


class DaySection(BaseModel):
    """`[plan.day]`: the rate of each hour, and what starting and stopping a replica takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rates: tuple[float, ...] = Field(min_length=24, max_length=24, description="Requests per second, hour by hour.")
    start_delay_s: float = Field(0.0, ge=0, description="From the start of a replica until it serves.")
    min_dwell_s: float = Field(0.0, ge=0, description="Least time that a replica is kept.")


class PlanSection(BaseModel):
    """`[plan]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rates: tuple[float, ...] = Field((), description="Requests per second.")
    day: DaySection | None = None
    attainment: float = Field(0.95, gt=0, lt=1, description="Share of requests that meet every limit.")
    policies: tuple[str, ...] = ("round_robin", "two_choices")
    spare: int = Field(0, ge=0, description="Replicas that may be lost with the promise still kept.")
    price_per_replica_hour: float | None = Field(None, gt=0)
    limit: tuple[LimitSection, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _known(self) -> "PlanSection":
        for policy in self.policies:
            if policy not in POLICIES:
                raise ValueError(f"policy `{policy}` is not offered; {', '.join(POLICIES)} are")
        for limit in self.limit:
            if LATENCY.fullmatch(limit.metric) is None or limit.max is None:
                raise ValueError(f"a plan's limit is the `max` of a latency of requests, not `{limit.metric}`")
        if not self.rates and self.day is None:
            raise ValueError("give `rates`, or those of a day under [plan.day]")
        if any(rate <= 0 for rate in self.asked[0]):
            raise ValueError("`rates` must be above 0")
        return self

    @property
    def asked(self) -> tuple[tuple[float, ...], list[tuple[float, str]]]:
        """Every rate, and what is sized: each of `rates` under every policy, those of the day under the first."""
        by_day = self.day.rates if self.day is not None else ()
        pairs = [(rate, policy) for rate in self.rates for policy in self.policies]
        pairs += [(rate, self.policies[0]) for rate in sorted(set(by_day)) if rate not in self.rates]
        return (*self.rates, *by_day), pairs

    @property
    def promise(self) -> Promise:
        limits = {limit.metric.split("_")[0]: float(limit.max or 0) for limit in self.limit}
        return Promise(limits, self.attainment)


class PlanFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: PlanSection


class PlanError(TunerError):
    """No fleet keeps the promise."""

    exit_code = 1


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.toml", help="Rates, limits and policies.")
    parser.add_argument("--cost", type=Path, metavar="FILE", help="Fitted cost file. Default the newest study's.")
    parser.add_argument("--load", type=Path, metavar="FILE", help="Whose prompts arrive. Default the study load.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="A launcher setting.")
    parser.add_argument("--effort", type=float, default=1.0, metavar="X", help="Scales the time simulated. Default 1.")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of the prompts. Default 0.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Write plan.csv and a report there.")
    parser.add_argument("--force", action="store_true", help="Plan although the cost model is too poor, marked.")
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")


def plan(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    """Size a fleet for each rate and policy. Exit code 3 where the cost model is too poor."""
    section = settings.load(PlanFile, settings.read_toml(given.plan)).plan
    costs = read_costs(given.cost or newest_cost())
    if costs.is_poor and not given.force:
        print("the cost model misses held-out steps by more than 8 %: no plan (--force)")
        return TOO_POOR
    chosen = settings_from(given.set)
    values = dict(settings.read_toml(given.load)) if given.load is not None else dict(DEFAULT_LOAD)
    config = settings.load(BenchConfig, {**values, "mode": "closed", "seed": given.seed})
    server = server_of(costs, chosen).with_settings(chosen, costs.pool).for_load(config)
    is_cached = bool(server.options.get("use_prefix_caching"))
    law = costs.of(server.settings).law
    fleet = Fleet(server.scheduler_options, law, partial(_asks, config, is_cached), server.max_concurrent_requests)
    try:
        sized = [
            size_fleet(fleet, section.promise, rate, policy, spare=section.spare, effort=given.effort)
            for rate, policy in section.asked[1]
        ]
    except ValueError as error:
        raise PlanError(str(error)) from None
    level = _level_error(costs)
    note = note_of(costs, is_forced=given.force)
    rows = [_row(each, section.price_per_replica_hour, level) for each in sized]
    day = _day(section, sized)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        with (given.out / "plan.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        write_plan_report(given.out, section, sized, rows, day, note)
    if given.json:
        told = {} if day is None else {"day": {**asdict(day), "hours": day.hours, "static_hours": day.static_hours}}
        print(json.dumps({"note": note, "rows": rows, **told}, indent=2))
    else:
        import pandas as pd

        print(pd.DataFrame(rows).to_string(index=False, float_format=lambda value: f"{value:.4g}"))
        if day is not None:
            print(f"a day: {day.hours:.1f} replica-hours; {day.static_hours:.0f} with the peak's fleet all day")
        if note:
            print(note)
    return 0


def _day(section: PlanSection, sized: Sequence[Sized]) -> Day | None:
    """The day of the first policy, spares included."""
    if section.day is None:
        return None
    replicas = {each.rate: each.with_spare for each in sized if each.policy == section.policies[0]}
    needed = [replicas[rate] for rate in section.day.rates]
    return day_of(needed, start_delay_s=section.day.start_delay_s, min_dwell_s=section.day.min_dwell_s)


def write_plan_report(
    directory: Path,
    section: PlanSection,
    sized: Sequence[Sized],
    rows: Sequence[Mapping[str, Any]],
    day: Day | None,
    note: str,
) -> None:
    """The plan as a page: what `plan.csv` holds, its curves and its day."""
    import pandas as pd

    from reports.report import write_built
    from reports.simulation_report import PlanData, build_plan_report

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
    if day is not None:
        hours = pd.DataFrame({"hour": range(len(day.needed)), "needed": day.needed, "running": day.running})
        hours = hours.assign(static=max(day.needed))
        facts = (("replica-hours of starting replicas", f"{day.starting_hours:.2f}"),)
        if price is not None:
            facts += (("cost of the day", f"{price * day.hours:.2f}"),)
            facts += (("cost of the peak's fleet all day", f"{price * day.static_hours:.2f}"),)
    plan = PlanData(
        "Capacity plan",
        table.assign(low=ends[0], high=ends[1]),
        pd.DataFrame(fleets),
        "replicas" if price is None else "cost per hour",
        section.attainment,
        tuple(f"{limit.metric} <= {limit.max:g}" for limit in section.limit),
        hours,
        facts,
        note,
    )
    write_built(build_plan_report(plan), directory)


def _asks(config: BenchConfig, with_ids: bool, seed: int) -> Callable[[int], list[Ask]]:
    """The load's prompts under another seed."""

    def first(count: int) -> list[Ask]:
        asks = load_of(config.model_copy(update={"seed": config.seed + seed}), with_ids=with_ids).asks
        return list(itertools.islice(asks, count))

    return first


def _level_error(costs: Any) -> float:
    """How far the level of the models may be off: the median error of steps they had not seen."""
    errors = [model.errors.median for model in costs.models.values() if model.errors is not None]
    return max((median for each in errors for median in each.values()), default=0.0)


def _row(sized: Sized, price: float | None, level: float) -> dict[str, Any]:
    at, count = sized.at, sized.at.replicas
    low, high = math.ceil(count * (1 - level)), math.ceil(count * (1 + level))
    row: dict[str, Any] = {
        "rate": sized.rate,
        "policy": sized.policy,
        "replicas": count,
        "range": f"{low}-{high}",
        "with_spare": sized.with_spare,
        "attainment": round(at.attainment, 4),
        "attainment_one_lost": None if sized.one_lost is None else round(sized.one_lost.attainment, 4),
        "ttft_p50_ms": round(at.ttft_p50_ms, 2),
        "ttft_p95_ms": round(at.ttft_p95_ms, 2),
        "tpot_mean_ms": round(at.tpot_mean_ms, 3),
        "utilisation": round(at.utilisation, 3),
    }
    if price is not None:
        per_hour = price * sized.with_spare
        row["cost_per_hour"] = round(per_hour, 4)
        row["cost_per_mtok"] = round(per_hour / (at.output_tokens_per_s * SECONDS_PER_HOUR) * 1e6, 4)
    return row
