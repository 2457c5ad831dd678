"""Success rate of `tgi-tune` searches: many seeds on a server whose optimum is known.

`python -m benchmarks.tuner.search --seeds 30` runs the product's search with the formula below as the server. It has an
out-of-memory region, two limits, 5 % noise on throughput and TPOT, and 10 % noise on TTFT p95. A search succeeds if the
true throughput of its result is within 5 % of the best within the limits, and its true latencies exceed the limits by
at most 5 %. `tight` is a 24 GB card with four parameters, `roomy` an 80 GB card with many users, `wide` the tight card
with seven parameters, one of them conditional. The limits are chosen so that given fractions of the grid meet them and
are near the best.

Strategy `simulator` is the default strategy with proposals of the simulator: the formula server writes a step trace of
its prefill and decode times. The formula and the simulator have the same step times but other queueing, so predictions
are not exact. benchmarks/tuner/simulator.py has searches on machines that the simulator can model.
"""

import argparse
import functools
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from loadgen.config.bench_config import BenchConfig
from loadgen.progress import SilentProgress
from loadgen.target.machine import describe_machine, library_versions
from reference_server.router.scheduling.step_work import StepWork
from tuner.config import TuneConfig
from tuner.servers.tgi import settings as tgi_settings
from tuner.servers.tgi.settings import DEFAULTS, server_config
from tuner.simulator.proposer import SimulatorProposer
from tuner.study.open_search import make_search
from tuner.study.search_worker import run_search
from tuner.study.study_search import StudySearch, best_of
from tuner.trial import measure
from tuner.trial.evaluate import STEPS_FILE, TrialSetup
from tuner.trial.outcome import AttemptOutcome, Infeasible, MeasuredAttempt

RESULTS = Path(__file__).parents[1] / "results" / "tuner.json"
STRATEGIES = {"random": "random", "tpe": "tpe", "default": "auto", "simulator": "auto"}
LOOKS = (20, 40)
COUNTED = {"success": "good", "limit": "limit"}
# Number of candidates of the simulator; a real study has more.
NUM_CANDIDATES = 128
SEARCHED = (
    *("quantize", "max_batch_prefill_tokens", "cuda_memory_fraction", "max_waiting_tokens"),
    *("waiting_served_ratio", "max_batch_size", "kv_cache_dtype"),
)
NEAR, SLACK = 0.05, 0.05
INPUT_TOKENS, OUTPUT_TOKENS = 1024, 256
QUANTIZE = ("none", "eetq", "fp8", "bitsandbytes", "bitsandbytes-nf4")
# Gigabytes of weights, and milliseconds of a decode step besides reading them.
WEIGHTS_GB = {"none": 15.0, "eetq": 8.3, "fp8": 8.3, "bitsandbytes": 8.5, "bitsandbytes-nf4": 5.4}
OVERHEAD_MS = {"none": 4.0, "eetq": 6.5, "fp8": 4.5, "bitsandbytes": 38.0, "bitsandbytes-nf4": 30.0}
# The 8-bit K/V type, and the schemes that support it.
NARROW, NARROW_WITH = "fp8_e4m3fn", ("none", "fp8")
PREFILL_COST = {"none": 1.0, "eetq": 1.1, "fp8": 0.85, "bitsandbytes": 1.6, "bitsandbytes-nf4": 1.5}


@dataclass(frozen=True, slots=True)
class Card:
    """A modelled machine and its load. Few configurations are within both limits."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    prefill_tokens_s: float
    users: int
    kv_mb: float
    ttft_p95_ms: float
    tpot_mean_ms: float
    is_wide: bool = False

    def truth(self, settings: Mapping[str, Any]) -> tuple[float, float, float] | str:
        """Tokens/s, TTFT p95 and mean TPOT in ms without noise, or the cause of a failed launch."""
        quantize = settings.get("quantize") or "none"
        budget, fraction = float(settings["max_batch_prefill_tokens"]), float(settings["cuda_memory_fraction"])
        wait_steps = self.wait_steps(settings)
        workspace = self.workspace_gb(settings)
        tokens = self.cache_tokens(settings)
        if tokens < INPUT_TOKENS + OUTPUT_TOKENS:
            return "no_cache"
        if fraction * self.memory_gb + 0.35 * workspace > 0.94 * self.memory_gb:
            return "memory"
        batch = min(self.users, tokens / (INPUT_TOKENS + 0.6 * OUTPUT_TOKENS), settings.get("max_batch_size") or 1e9)
        step_ms = self.decode_ms(quantize, batch, is_narrow=_is_narrow(settings))
        at_once = max(1.0, min(budget / INPUT_TOKENS, batch / OUTPUT_TOKENS * (wait_steps + 4)))
        # Decoding is paused during a prefill.
        prefill_ms = self.prefill_ms(quantize, at_once)
        per_token_ms = step_ms + prefill_ms * batch / (at_once * OUTPUT_TOKENS)
        request_s = (OUTPUT_TOKENS * per_token_ms + prefill_ms) / 1e3
        rate = batch / request_s
        queued_ms = 1e3 * max(0.0, self.users - batch) / rate
        ttft_ms = 1.6 * (queued_ms + 0.7 * wait_steps * step_ms + 1.5 * prefill_ms)
        return rate * OUTPUT_TOKENS, ttft_ms, per_token_ms

    def wait_steps(self, settings: Mapping[str, Any]) -> float:
        """The number of decode steps that prompts wait: until enough prompts wait, or `max_waiting_tokens`."""
        ratio = settings.get("waiting_served_ratio")
        enough = OUTPUT_TOKENS * float(DEFAULTS["waiting_served_ratio"] if ratio is None else ratio)
        return min(float(settings["max_waiting_tokens"]), enough)

    def workspace_gb(self, settings: Mapping[str, Any]) -> float:
        is_unpacked = str(settings.get("quantize")).startswith("bits")
        return 0.4 + 0.00011 * float(settings["max_batch_prefill_tokens"]) * (1.3 if is_unpacked else 1.0)

    def cache_tokens(self, settings: Mapping[str, Any]) -> float:
        """K/V tokens that fit in addition to weights and workspace."""
        weights = WEIGHTS_GB[settings.get("quantize") or "none"]
        cache = float(settings["cuda_memory_fraction"]) * self.memory_gb * 0.95 - weights - self.workspace_gb(settings)
        return 1024 * cache / (self.kv_mb * (0.5 if _is_narrow(settings) else 1.0))

    def decode_ms(self, quantize: str, rows: float, *, is_narrow: bool = False) -> float:
        """Time of a decode step; 8-bit K/V is read in half the time but must be unpacked."""
        read_ms = rows * 1.2 * self.kv_mb * (0.5 if is_narrow else 1.0)
        unpack_ms = 1.5 if is_narrow else 0.0
        return 1e3 * WEIGHTS_GB[quantize] / self.bandwidth_gb_s + OVERHEAD_MS[quantize] + read_ms + unpack_ms

    def prefill_ms(self, quantize: str, prompts: float) -> float:
        """Time of a prefill of `prompts` prompts: a fixed time plus a time for each."""
        prompt_ms = 1e3 * INPUT_TOKENS / self.prefill_tokens_s * PREFILL_COST[quantize]
        return (35.0 + prompts * prompt_ms * (1 + 0.25 / prompts)) * (1 + 0.05 * math.log2(prompts + 1))

    def is_within(self, ttft_ms: float, tpot_ms: float, slack: float = 0.0) -> bool:
        return ttft_ms <= self.ttft_p95_ms * (1 + slack) and tpot_ms <= self.tpot_mean_ms * (1 + slack)

    def grid(self) -> Iterator[dict[str, Any]]:
        """A grid of the space; it is so fine that its best point is near the optimum."""
        budgets, fractions, waits = (21, 13, 11) if self.is_wide else (41, 26, 21)
        ratios = (0.1, 0.2, 0.3, 1.0, 3.0) if self.is_wide else (None,)
        sizes = (8, 16, 24, 32, 48, 128) if self.is_wide else (None,)
        for quantize in QUANTIZE:
            narrow = (None, NARROW) if self.is_wide and quantize in NARROW_WITH else (None,)
            for i, j, k, ratio, size, dtype in itertools.product(
                range(budgets), range(fractions), range(waits), ratios, sizes, narrow
            ):
                yield {
                    "quantize": quantize,
                    "max_batch_prefill_tokens": 64 * round(2048 * 16 ** (i / (budgets - 1)) / 64),
                    "cuda_memory_fraction": 0.5 + 0.5 / (fractions - 1) * j if self.is_wide else 0.5 + 0.02 * j,
                    "max_waiting_tokens": round(100 ** (k / (waits - 1))),
                    "waiting_served_ratio": ratio,
                    "max_batch_size": size,
                    "kv_cache_dtype": dtype,
                }

    def optimum(self) -> tuple[float, float, float]:
        """The best throughput within the limits, and the fractions of the grid within them and near the best."""
        found = [truth for each in self.grid() if not isinstance(truth := self.truth(each), str)]
        feasible = [rate for rate, ttft, tpot in found if self.is_within(ttft, tpot)]
        best = max(feasible)
        size = sum(1 for _ in self.grid())
        near = sum(rate >= (1 - NEAR) * best and self.is_within(ttft, tpot, SLACK) for rate, ttft, tpot in found)
        return best, len(feasible) / size, near / size


def _is_narrow(settings: Mapping[str, Any]) -> bool:
    return settings.get("kv_cache_dtype") == NARROW


CARDS = {
    "tight": Card("tight", 24, 300, 9_000, 48, 0.25, 9_000, 75),
    "roomy": Card("roomy", 80, 2_000, 30_000, 320, 0.125, 5_000, 100),
    "wide": Card("wide", 24, 300, 9_000, 48, 0.25, 9_000, 75, is_wide=True),
}
# Fractions of each card's grid that are feasible and that are near the best. `wide` has the limits of `tight`.
FRACTIONS = {"tight": (0.018, 0.004), "roomy": (0.025, 0.003)}


def card_of(name: str) -> Card:
    """A card with its limits."""
    card, like = CARDS[name], "tight" if name == "wide" else name
    found = calibrated(CARDS[like], *FRACTIONS[like])
    return replace(card, ttft_p95_ms=found.ttft_p95_ms, tpot_mean_ms=found.tpot_mean_ms)


def calibrated(card: Card, feasible_fraction: float, near_fraction: float) -> Card:
    """The card with limits such that given fractions of the grid are within them, and are near the best.

    Many pairs of limits give the first fraction; of these, the pair nearest to the second fraction is chosen.
    """
    found = [truth for each in card.grid() if not isinstance(truth := card.truth(each), str)]
    size = sum(1 for _ in card.grid())
    rates, ttfts, tpots = (np.array([each[i] for each in found]) for i in range(3))
    wanted = int(feasible_fraction * size)
    options = []
    for level in np.linspace(0.02, 1.0, 50):
        tpot_limit = float(np.quantile(tpots, level))
        eligible = np.sort(ttfts[tpots <= tpot_limit])
        if len(eligible) < wanted:
            continue
        ttft_limit = float(eligible[wanted - 1])
        best = rates[(tpots <= tpot_limit) & (ttfts <= ttft_limit)].max()
        slack = 1 + SLACK
        taken = (tpots <= slack * tpot_limit) & (ttfts <= slack * ttft_limit) & (rates >= (1 - NEAR) * best)
        near = float(taken.sum()) / size
        options.append((abs(math.log(near / near_fraction)), ttft_limit, tpot_limit))
    _, ttft_limit, tpot_limit = min(options)
    return replace(card, ttft_p95_ms=ttft_limit, tpot_mean_ms=tpot_limit)


class FormulaServer:
    """Replaces the launch and measurement of a trial: the card's true metrics with the noise of a launch."""

    def __init__(self, card: Card, seed: int) -> None:
        self._card = card
        self._random = random.Random(seed)

    def __call__(self, chosen: Mapping[str, Any], _setup: TrialSetup, directory: Path) -> AttemptOutcome:
        config = server_config(chosen)
        settings = {name: getattr(config, name) for name in SEARCHED}
        settings["max_batch_prefill_tokens"] = (
            settings["max_batch_prefill_tokens"] or DEFAULTS["max_batch_prefill_tokens"]
        )
        truth = self._card.truth(settings)
        if isinstance(truth, str):
            return Infeasible("launch", "no_cache" if truth == "no_cache" else "memory", truth)
        rate, ttft_ms, tpot_ms = truth
        noisy = [
            value * math.exp(self._random.gauss(0, s)) for value, s in ((rate, 0.05), (ttft_ms, 0.1), (tpot_ms, 0.05))
        ]
        run = directory / "run"
        run.mkdir(parents=True, exist_ok=True)
        write_steps(directory / STEPS_FILE, self._card, settings)
        return MeasuredAttempt(run, {"value": noisy[0], "ttft_p95_ms": noisy[1], "tpot_mean_ms": noisy[2]})


def write_steps(path: Path, card: Card, settings: Mapping[str, Any]) -> None:
    """Write the step trace of a launch: prefills and decode steps of designed sizes."""
    quantize, is_narrow = settings.get("quantize") or "none", _is_narrow(settings)
    works, walls_ms = [], []
    for prompts in (1, 2, 4, 8, 16):
        works.append(StepWork(prompts, prompts * INPUT_TOKENS, prompts * INPUT_TOKENS**2))
        walls_ms.append(card.prefill_ms(quantize, prompts))
    for rows in (1, 2, 4, 8, 16, 32, 48, 96, 192, 320):
        works.append(StepWork(rows=rows, kv=rows * (INPUT_TOKENS + OUTPUT_TOKENS // 2)))
        walls_ms.append(card.decode_ms(quantize, rows, is_narrow=is_narrow))
    budget = int(settings["max_batch_prefill_tokens"])
    facts = {
        "scheduler": {
            "max_batch_prefill_tokens": budget,
            "max_batch_total_tokens": int(card.cache_tokens(settings)),
            "waiting_served_ratio": settings["waiting_served_ratio"] or DEFAULTS["waiting_served_ratio"],
            "max_waiting_tokens": settings["max_waiting_tokens"],
            "block_size": 16,
            "schema": "v3",
        },
        "settings": {name: {"value": value} for name, value in settings.items()},
        "engine": {
            "memory": {
                "weight_bytes": int(1e9 * WEIGHTS_GB[quantize]),
                "prefill_peak_bytes": int(1e9 * card.workspace_gb(settings)),
            }
        },
    }
    head = {"format": 2, "columns": [*StepWork._fields, "total_ns", "wall_ns"], "facts": facts}
    rows_of = [[*work, 0, 1e6 * wall] for work, wall in zip(works * 2, walls_ms * 2, strict=True)]
    path.write_text("\n".join(map(json.dumps, [head, *rows_of])) + "\n")


def one_search(card: Card, strategy: str, seed: int, trials: int) -> dict[int, str]:
    """The verdict on the result of a search after each look: good, limit, slow or none."""
    folder = Path(tempfile.mkdtemp(prefix="tuner-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    names = {"output_tokens_per_s": "value"}
    load = BenchConfig(
        mode="closed", concurrency=card.users, input_tokens=f"{INPUT_TOKENS}", output_tokens=f"{OUTPUT_TOKENS}"
    )
    # Metrics are those of the formula, and values that this machine does not support are searched too.
    formula_metrics = patch.object(measure, "metric_value", lambda summary, name, _: summary.get(names.get(name, name)))
    every_value = patch.object(tgi_settings, "unsupported_settings", lambda _: [])
    try:
        with formula_metrics, every_value:
            config = config_of(card, strategy, seed, trials)
            setup = TrialSetup(load, 1.0, SilentProgress())
            search = make_search(folder / "s", config, setup, FormulaServer(card, seed))
            if isinstance(search.proposer, SimulatorProposer):
                search.proposer.num_candidates, search.proposer.jobs = NUM_CANDIDATES, 1
            results = run_search(search)
            return {look: verdict(card, search, results, look) for look in LOOKS if look <= trials}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Permits for every user: the formula does not model rejected requests.
FIXED = {
    **{"max_input_tokens": INPUT_TOKENS, "max_total_tokens": 2048},
    **{"prefill_chunking": False, "max_concurrent_requests": 1024},
}
WIDER: Mapping[str, Any] = {
    "waiting_served_ratio": {"type": "float", "low": 0.1, "high": 3.0, "log": True},
    "max_batch_size": {"type": "int", "low": 8, "high": 128, "log": True},
    "kv_cache_dtype": {"type": "choice", "values": ["auto", NARROW], "when": "quantize in ['none', 'fp8']"},
}


def config_of(card: Card, strategy: str, seed: int, trials: int) -> TuneConfig:
    """The study. Trial 0 is not part of the budget, as in the figures of the comparison."""
    limits = [{"metric": "ttft_p95_ms", "max": card.ttft_p95_ms}, {"metric": "tpot_mean_ms", "max": card.tpot_mean_ms}]
    memory_low = 0.8 if STRATEGIES[strategy] == "auto" else 0.5
    return TuneConfig.model_validate({
        "study": {
            "trials": trials + 1,
            "noise_runs": 0,
            "seed": seed,
            "sampler": STRATEGIES[strategy],
            "drift_check_every": 0,
            "simulator": "gp" if strategy == "simulator" else "off",
        },
        "server": {"fixed": FIXED},
        "objective": {"maximize": "output_tokens_per_s", "limit": limits},
        "param": {
            "max_batch_prefill_tokens": {"type": "int", "low": 2048, "high": 32768, "log": True, "multiple_of": 64},
            "max_waiting_tokens": {"type": "int", "low": 1, "high": 100, "log": True},
            "cuda_memory_fraction": {"type": "float", "low": memory_low, "high": 1.0, "step": 0.01},
            "quantize": {"type": "choice", "values": list(QUANTIZE)},
            **(WIDER if card.is_wide else {}),
        },
    })  # fmt: skip


def verdict(card: Card, search: StudySearch, results: list[Any], look: int) -> str:
    """The verdict on the result after `look` launches, by its true metrics."""
    launched = [each for each in results if each.was_launched][: look + 1]
    best = result_of(search, launched)
    if best is None:
        return "none"
    truth = card.truth({**DEFAULTS, **{name: value for name, value in best.settings.items() if value is not None}})
    assert not isinstance(truth, str), "a measured configuration has metrics"
    rate, ttft_ms, tpot_ms = truth
    if not card.is_within(ttft_ms, tpot_ms, SLACK):
        return "limit"
    return "good" if rate >= (1 - NEAR) * optimum_of(card) else "slow"


def result_of(search: StudySearch, launched: list[Any]) -> Any:
    """The best finalist of the proposer if the simulator proposes; else the best measured configuration."""
    if isinstance(search.proposer, SimulatorProposer):
        return next(iter(search.finalists(launched)), None)
    return next(iter(best_of(launched, search.objective)), None)


@functools.cache
def optimum_of(card: Card) -> float:
    return card.optimum()[0]


def run_one(job: tuple[Card, str, int]) -> tuple[str, str, dict[int, str]]:
    card, strategy, seed = job
    return card.name, strategy, one_search(card, strategy, seed, max(LOOKS))


def rows_of(card: str, strategy: str, verdicts: Sequence[Mapping[int, str]]) -> list[dict[str, Any]]:
    """One row for each look, over the seeds of one strategy on one card."""
    rows = []
    for look in verdicts[0]:
        texts = [each[look] for each in verdicts]
        percents = {f"{name}_percent": round(100 * texts.count(text) / len(texts)) for name, text in COUNTED.items()}
        rows.append({"card": card, "strategy": strategy, "launches": look, "seeds": len(texts), **percents})
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows into a results file; they replace earlier rows of the same card and strategy."""
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {(row["card"], row["strategy"]) for row in rows}
    kept = [row for row in kept if (row["card"], row["strategy"]) not in new]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    content = {"machine": describe_machine(), "versions": library_versions(), "rows": [*kept, *rows]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Success rate of searches on a server with a known optimum.")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    cards = [card_of(name) for name in args.cards.split(",")]
    for card in cards:
        best, feasible, near = card.optimum()
        print(f"{card.name}: best {best:,.0f} tokens/s, {feasible:.1%} of the grid feasible, {near:.2%} near the best")
    jobs = [
        (card, strategy, seed)
        for card in cards
        for strategy in args.strategies.split(",")
        for seed in range(args.seeds)
    ]
    found: dict[tuple[str, str], list[dict[int, str]]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, strategy, verdicts in pool.map(run_one, jobs):
            done = found.setdefault((name, strategy), [])
            done.append(verdicts)
            if len(done) == args.seeds:
                write_rows(args.out, rows_of(name, strategy, done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
