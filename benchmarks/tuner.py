"""How often a search of `tgi-tune` ends near the optimum: many seeds on a server whose optimum is known.

`python -m benchmarks.tuner --seeds 30` runs the product's own search, launch for launch, with the formula below in the
place of a server: an out-of-memory region, two limits, 5 % noise on throughput and TPOT and 10 % on TTFT p95. A search
has succeeded when what it hands over is truly within 5 % of the best that meets the limits, and truly within them by
no more than 5 %. `tight` is a 24 GB card with four knobs, `roomy` one of 80 GB with many users. The searches guided by
the simulator are measured by benchmarks/simulator.py, on machines that the simulator can look into.
"""

import argparse
import functools
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.config import BenchConfig
from loadgen.machine import describe_machine, library_versions
from loadgen.progress import Silent
from reference_server.config import ServerConfig
from tuner import measure, space
from tuner.config import TuneConfig
from tuner.evaluate import Bench
from tuner.outcome import Infeasible, Measured, TrialOutcome
from tuner.resolve import DEFAULTS
from tuner.search import Search, best_of

RESULTS = Path(__file__).parent / "results" / "tuner.json"
STRATEGIES = {"random": "random", "tpe": "tpe", "default": "auto"}
LOOKS = (20, 40)
NEAR, SLACK = 0.05, 0.05
INPUT_TOKENS, OUTPUT_TOKENS = 1024, 256
QUANTIZE = ("none", "eetq", "fp8", "bitsandbytes", "bitsandbytes-nf4")
# Gigabytes of weights and milliseconds that a decode step takes beside reading them.
WEIGHTS_GB = {"none": 15.0, "eetq": 8.3, "fp8": 8.3, "bitsandbytes": 8.5, "bitsandbytes-nf4": 5.4}
OVERHEAD_MS = {"none": 4.0, "eetq": 6.5, "fp8": 4.5, "bitsandbytes": 38.0, "bitsandbytes-nf4": 30.0}
PREFILL_COST = {"none": 1.0, "eetq": 1.1, "fp8": 0.85, "bitsandbytes": 1.6, "bitsandbytes-nf4": 1.5}


@dataclass(frozen=True, slots=True)
class Card:
    """A pretend machine and the load on it; limits are chosen so that few configurations meet both."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    prefill_tokens_s: float
    users: int
    kv_mb: float
    ttft_p95_ms: float
    tpot_mean_ms: float

    def truth(self, settings: Mapping[str, Any]) -> tuple[float, float, float] | str:
        """Tokens a second, TTFT p95 and mean TPOT in ms, without noise; or how the configuration dies."""
        quantize = settings.get("quantize") or "none"
        budget, fraction = float(settings["max_batch_prefill_tokens"]), float(settings["cuda_memory_fraction"])
        patience = float(settings["max_waiting_tokens"])
        weights = WEIGHTS_GB[quantize]
        workspace = 0.4 + 0.00011 * budget * (1.3 if quantize.startswith("bits") else 1.0)
        cache = fraction * self.memory_gb * 0.95 - weights - workspace
        tokens = 1024 * cache / self.kv_mb
        if tokens < INPUT_TOKENS + OUTPUT_TOKENS:
            return "no_cache"
        if fraction * self.memory_gb + 0.35 * workspace > 0.94 * self.memory_gb:
            return "memory"
        batch = min(self.users, tokens / (INPUT_TOKENS + 0.6 * OUTPUT_TOKENS))
        step_ms = 1e3 * weights / self.bandwidth_gb_s + OVERHEAD_MS[quantize] + batch * 1.2 * self.kv_mb
        at_once = max(1.0, min(budget / INPUT_TOKENS, batch / OUTPUT_TOKENS * (patience + 4)))
        prompt_ms = 1e3 * INPUT_TOKENS / self.prefill_tokens_s * PREFILL_COST[quantize]
        # A prefill has a fixed price, shared by the prompts that go together; decoding waits while it runs.
        prefill_ms = (35.0 + at_once * prompt_ms * (1 + 0.25 / at_once)) * (1 + 0.05 * math.log2(at_once + 1))
        per_token_ms = step_ms + prefill_ms * batch / (at_once * OUTPUT_TOKENS)
        request_s = (OUTPUT_TOKENS * per_token_ms + prefill_ms) / 1e3
        rate = batch / request_s
        queued_ms = 1e3 * max(0.0, self.users - batch) / rate
        ttft_ms = 1.6 * (queued_ms + 0.7 * patience * step_ms + 1.5 * prefill_ms)
        return rate * OUTPUT_TOKENS, ttft_ms, per_token_ms

    def is_within(self, ttft_ms: float, tpot_ms: float, slack: float = 0.0) -> bool:
        return ttft_ms <= self.ttft_p95_ms * (1 + slack) and tpot_ms <= self.tpot_mean_ms * (1 + slack)

    def grid(self) -> Iterator[dict[str, Any]]:
        """The space, fine enough that its best is the optimum."""
        for quantize in QUANTIZE:
            for i in range(41):
                for j in range(26):
                    for k in range(21):
                        yield {
                            "quantize": quantize,
                            "max_batch_prefill_tokens": 64 * round(2048 * 16 ** (i / 40) / 64),
                            "cuda_memory_fraction": 0.5 + 0.02 * j,
                            "max_waiting_tokens": round(100 ** (k / 20)),
                        }

    def optimum(self) -> tuple[float, float, float]:
        """The best throughput within the limits, and the shares of the grid within them and that count as found."""
        found = [truth for each in self.grid() if not isinstance(truth := self.truth(each), str)]
        feasible = [rate for rate, ttft, tpot in found if self.is_within(ttft, tpot)]
        best = max(feasible)
        size = sum(1 for _ in self.grid())
        near = sum(rate >= (1 - NEAR) * best and self.is_within(ttft, tpot, SLACK) for rate, ttft, tpot in found)
        return best, len(feasible) / size, near / size


CARDS = {
    "tight": Card("tight", 24, 300, 9_000, 48, 0.25, 9_000, 75),
    "roomy": Card("roomy", 80, 2_000, 30_000, 320, 0.125, 5_000, 100),
}


def calibrated(card: Card, feasible_share: float, near_share: float, least_fraction: float) -> Card:
    """The card with limits that a given share of the space meets, and a given share of it with the best throughput.

    The best takes at least a share of the memory: how scarce that is.
    One limit may be loose while the other is tight: of pairs that leave the first share, the one nearest the second.
    """
    settings = [each for each in card.grid() if not isinstance(card.truth(each), str)]
    found = [card.truth(each) for each in settings]
    fractions = np.array([each["cuda_memory_fraction"] for each in settings])
    size = sum(1 for _ in card.grid())
    rates, ttfts, tpots = (np.array([each[i] for each in found]) for i in range(3))
    wanted = int(feasible_share * size)
    options = []
    for level in np.linspace(0.02, 1.0, 50):
        tpot_limit = float(np.quantile(tpots, level))
        eligible = np.sort(ttfts[tpots <= tpot_limit])
        if len(eligible) < wanted:
            continue
        ttft_limit = float(eligible[wanted - 1])
        within = (tpots <= tpot_limit) & (ttfts <= ttft_limit)
        best = rates[within].max()
        if fractions[within][rates[within].argmax()] < least_fraction:
            continue
        slack = 1 + SLACK
        taken = (tpots <= slack * tpot_limit) & (ttfts <= slack * ttft_limit) & (rates >= (1 - NEAR) * best)
        near = float(taken.sum()) / size
        options.append((abs(math.log(near / near_share)), ttft_limit, tpot_limit))
    _, ttft_limit, tpot_limit = min(options)
    return replace(card, ttft_p95_ms=ttft_limit, tpot_mean_ms=tpot_limit)


class PretendServer:
    """Stands in for `evaluate`: the card's truth with the noise of a launch."""

    def __init__(self, card: Card, seed: int) -> None:
        self._card = card
        self._random = random.Random(seed)

    def __call__(self, config: ServerConfig, _bench: Bench, directory: Path) -> TrialOutcome:
        settings = {name: getattr(config, name) for name in ("quantize", "cuda_memory_fraction", "max_waiting_tokens")}
        truth = self._card.truth(
            {
                **settings,
                "max_batch_prefill_tokens": config.max_batch_prefill_tokens or DEFAULTS["max_batch_prefill_tokens"],
            }
        )
        if isinstance(truth, str):
            return Infeasible("launch", "no_cache" if truth == "no_cache" else "memory", truth)
        rate, ttft_ms, tpot_ms = truth
        noisy = [
            value * math.exp(self._random.gauss(0, s)) for value, s in ((rate, 0.05), (ttft_ms, 0.1), (tpot_ms, 0.05))
        ]
        run = directory / "run"
        run.mkdir(parents=True, exist_ok=True)
        return Measured(run, {"value": noisy[0], "ttft_p95_ms": noisy[1], "tpot_mean_ms": noisy[2]})


def one_search(card: Card, strategy: str, seed: int, trials: int) -> dict[int, str]:
    """What a search of one seed would hand over after each look: good, limit, slow or none."""
    folder = Path(tempfile.mkdtemp(prefix="tuner-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    names = {"output_tokens_per_s": "value"}
    measure.metric_value = lambda summary, name, _: summary.get(names.get(name, name))  # type: ignore[attr-defined]
    # This server need not serve a value for it to be searched here.
    space.unsupported_settings = lambda _: []  # type: ignore[attr-defined]
    try:
        config = config_of(card, strategy, seed, trials)
        bench = Bench(BenchConfig(), 1.0, Silent())
        search = Search.open(folder / "s", config, bench, PretendServer(card, seed))
        results = search.run()
        return {look: verdict(card, search, results, look) for look in LOOKS if look <= trials}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def config_of(card: Card, strategy: str, seed: int, trials: int) -> TuneConfig:
    """The study: trial 0 is on top of the budget, as in the figures that this is compared with."""
    limits = [{"metric": "ttft_p95_ms", "max": card.ttft_p95_ms}, {"metric": "tpot_mean_ms", "max": card.tpot_mean_ms}]
    memory_low = 0.8 if strategy == "default" else 0.5
    return TuneConfig.model_validate({
        "study": {
            "trials": trials + 1,
            "noise_runs": 0,
            "seed": seed,
            "sampler": STRATEGIES[strategy],
            "anchor_every": 0,
            "guide": "off",
        },
        "server": {"fixed": {"max_input_tokens": INPUT_TOKENS, "max_total_tokens": 2048, "prefill_chunking": False}},
        "objective": {"maximize": "output_tokens_per_s", "limit": limits},
        "param": {
            "max_batch_prefill_tokens": {"type": "int", "low": 2048, "high": 32768, "log": True, "multiple_of": 64},
            "max_waiting_tokens": {"type": "int", "low": 1, "high": 100, "log": True},
            "cuda_memory_fraction": {"type": "float", "low": memory_low, "high": 1.0, "step": 0.01},
            "quantize": {"type": "choice", "values": list(QUANTIZE)},
        },
    })  # fmt: skip


def verdict(card: Card, search: Search, results: list[Any], look: int) -> str:
    """What the best configuration after so many launches truly is."""
    launched = [each for each in results if each.was_launched][: look + 1]
    best = best_of(launched, search.objective)
    if not best:
        return "none"
    truth = card.truth({**DEFAULTS, **best[0].settings})
    assert not isinstance(truth, str), "what was measured lives"
    rate, ttft_ms, tpot_ms = truth
    if not card.is_within(ttft_ms, tpot_ms, SLACK):
        return "limit"
    return "good" if rate >= (1 - NEAR) * optimum_of(card) else "slow"


@functools.cache
def optimum_of(card: Card) -> float:
    return card.optimum()[0]


def run_one(job: tuple[Card, str, int]) -> tuple[str, str, dict[int, str]]:
    card, strategy, seed = job
    return card.name, strategy, one_search(card, strategy, seed, max(LOOKS))


def main() -> int:
    parser = argparse.ArgumentParser(description="Success of searches on a server with a known optimum.")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cards", default="tight,roomy")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    shares = {"tight": (0.018, 0.004, 0.8), "roomy": (0.025, 0.003, 0.7)}
    cards = [calibrated(CARDS[name], *shares[name]) for name in given.cards.split(",")]
    for card in cards:
        best, feasible, near = card.optimum()
        print(f"{card.name}: best {best:,.0f} tokens/s, {feasible:.1%} of the grid feasible, {near:.2%} near the best")
    jobs = [
        (card, strategy, seed)
        for card in cards
        for strategy in given.strategies.split(",")
        for seed in range(given.seeds)
    ]
    found: dict[tuple[str, str, int], list[str]] = {}
    with ProcessPoolExecutor(given.jobs) as pool:
        for name, strategy, verdicts in pool.map(run_one, jobs):
            for look, text in verdicts.items():
                found.setdefault((name, strategy, look), []).append(text)
    rows = [
        {
            "card": name,
            "strategy": strategy,
            "launches": look,
            "seeds": len(texts),
            "success_percent": round(100 * texts.count("good") / len(texts)),
            "limit_percent": round(100 * texts.count("limit") / len(texts)),
        }
        for (name, strategy, look), texts in found.items()
    ]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    content = {"machine": describe_machine(), "versions": library_versions(), "rows": rows}
    given.out.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
