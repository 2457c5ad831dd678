"""False alarms and power of the gate on a measured mixture of noise, for separate runs and for interleaved slices.

    python -m benchmarks.reports.gate_power gate_pairs.json --out benchmarks/results/gate.json

Reads the A/A pairs of `gate_pairs`, splits their noise, and simulates comparisons. Launch differences are normal with
the measured covariance. Drift and noise of slices are resampled by measured pair, so the slices of a noisy minute stay
together. `--noise 2` scales the noise of a run to 2 %; the proportion of the components stays as measured.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reports.gate.comparison import MIN_EFFECT, CompareOptions
from reports.gate.decide import Evidence, GateDecision, decide
from reports.gate.noise_split import NoiseSplit, split_noise
from reports.gate.side_run import Pair, SideRun, log_degradation
from reports.run_store import write_json

Array = npt.NDArray[np.float64]
METRICS = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms")
CONTENTION = "contention"
EFFECTS = (0.0, 0.05)
RECIPE_EFFECT = 0.05
"""The smallest effect of interest of `make perf-gate`."""


@dataclass(frozen=True, slots=True)
class Design:
    """How a pair is measured: `slices` of each side, interleaved, or as two separate runs of the same length.

    pairs: a fixed number of pairs; None for a sequence of looks, from `first` to `last` pairs. is_adjusted: changes are
    adjusted to equal contention.
    """

    name: str
    slices: int
    is_interleaved: bool
    pairs: int | None = None
    is_adjusted: bool = False
    first: int = 4
    last: int = 12
    min_effect: float = MIN_EFFECT

    @property
    def options(self) -> CompareOptions:
        return CompareOptions(
            gated=METRICS,
            shown=(),
            pairs=self.pairs,
            min_pairs=self.first,
            max_pairs=self.last,
            min_effect=self.min_effect,
        )


@dataclass(frozen=True, slots=True)
class NoiseMixture:
    """Noise of pairs; the last metric is the contention.

    launch: covariance of launch differences, [metrics, metrics]. drift: of two separate runs, [pairs, metrics].
    slice_noise: of slice pairs, [pairs, metrics, slices].
    """

    launch: Array
    drift: Array
    slice_noise: Array

    @classmethod
    def of(cls, pairs: Sequence[Pair], run_noise: float | None = None) -> "NoiseMixture":
        """The noise of measured A/A pairs, scaled so that a separate run has the standard deviation `run_noise`."""
        a, b = (np.stack([_values(pairs, name, side) for name in (*METRICS, CONTENTION)], axis=1) for side in "ab")
        slices = a.shape[2]
        splits = [NoiseSplit.of("", a[:, column], b[:, column]) for column in range(a.shape[1])]
        difference, level = b - a, (a + b) / 2
        noise = (difference - difference.mean(axis=2, keepdims=True)) * math.sqrt(slices / (slices - 1))
        half = slices // 2
        moved = level[:, :, -half:].mean(axis=2) - level[:, :, :half].mean(axis=2)
        moved *= np.array([math.sqrt(2 * each.drift) for each in splits]) / np.sqrt(np.mean(moved**2, axis=0))
        deviations = np.array([math.sqrt(2 * each.launch) for each in splits])
        launch = np.corrcoef(difference.mean(axis=2).T) * np.outer(deviations, deviations)
        scale = np.ones(len(splits))
        if run_noise is not None:
            scale = np.array([math.sqrt(2) * run_noise / each.separate(slices) for each in splits])
        return cls(launch * np.outer(scale, scale), moved * scale, noise * scale[:, None])

    def differences(self, random: np.random.Generator, pairs: int, design: Design) -> Array:
        """d of simulated pairs of equal servers, and the log ratio of their contention, [pairs, metrics]."""
        measured, metrics, slices = self.slice_noise.shape
        chosen = random.integers(0, measured, pairs)
        picked = random.integers(0, slices, (pairs, design.slices))
        sign = random.choice((-1.0, 1.0), (pairs, design.slices))
        noise = self.slice_noise[chosen[:, None], :, picked] * sign[:, :, None]
        launch = random.multivariate_normal(np.zeros(metrics), self.launch, pairs, method="svd")
        found: Array = launch + noise.mean(axis=1)
        return found if design.is_interleaved else found + self.drift[chosen] * random.choice((-1.0, 1.0), (pairs, 1))


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Verdicts of simulated comparisons: counts, and the mean number of pairs of a comparison."""

    comparisons: int
    regressions: int
    passes: int
    mean_pairs: float


def outcomes(
    mixture: NoiseMixture, design: Design, effect: float, comparisons: int, random: np.random.Generator
) -> Outcomes:
    """Simulated comparisons with a true effect (a fraction) on every metric."""
    last = design.options.looks[-1]
    drawn = mixture.differences(random, comparisons * last, design).reshape(comparisons, last, -1)
    d, contention = drawn[:, :, :-1] + math.log1p(effect), drawn[:, :, -1]
    results = [
        verdict(each, design.options, x if design.is_adjusted else None) for each, x in zip(d, contention, strict=True)
    ]
    found = [word for word, _ in results]
    passes = sum(word in (GateDecision.PASS, GateDecision.IMPROVEMENT) for word in found)
    return Outcomes(
        comparisons, found.count(GateDecision.REGRESSION), passes, float(np.mean([pairs for _, pairs in results]))
    )


def verdict(d: Array, options: CompareOptions, contention: Array | None = None) -> tuple[GateDecision, int]:
    """The verdict on the d of one comparison, [pairs, metrics], and the number of pairs after which it is final."""

    def evidence(name: str, look: int) -> Evidence:
        values = columns[name][:look]
        return Evidence.of_pairs(values) if contention is None else Evidence.adjusted(values, contention[:look])

    columns = dict(zip(options.gated, d.T, strict=True))
    limits = {name: options.limit(name) for name in columns}
    found = decide(options.gated, evidence, limits, options.levels)
    decisions = {each.decision for each in found.values()}
    undecided = len(found) < len(columns)
    pairs = options.looks[-1] if undecided else max(each.look for each in found.values())
    if GateDecision.REGRESSION in decisions:
        return GateDecision.REGRESSION, pairs
    return (GateDecision.INCONCLUSIVE if undecided else GateDecision.PASS), pairs


def pairs_of(content: Mapping[str, Any]) -> list[Pair]:
    """The pairs in the content of a file of `gate_pairs`."""
    return [
        Pair.of_slices([Pair(_run("A", each["a"]), _run("B", each["b"])) for each in pair["slices"]])
        for pair in content["pairs"]
    ]


def _run(label: str, values: Mapping[str, float]) -> SideRun:
    return SideRun(label, {name: values[name] for name in METRICS}, contention=values.get(CONTENTION))


def with_contention(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs whose slices all have a contention."""
    return [pair for pair in pairs if all(each.a.contention and each.b.contention for each in pair.slices)]


def designs(slices: int) -> tuple[Design, ...]:
    """Pairs of separate runs, and interleaved pairs: until the decision, and with half the number of pairs."""
    return (
        Design("separate runs, 4 to 12 pairs", slices, is_interleaved=False),
        Design(f"{slices} slices, 4 to 12 pairs", slices, is_interleaved=True),
        Design(f"{2 * slices} slices, 4 to 12 pairs", 2 * slices, is_interleaved=True),
        Design("separate runs, 12 pairs", slices, is_interleaved=False, pairs=12),
        Design(f"{slices} slices, 6 pairs", slices, is_interleaved=True, pairs=6),
        Design(f"{2 * slices} slices, 6 pairs", 2 * slices, is_interleaved=True, pairs=6),
        Design(f"{4 * slices} slices, 6 pairs", 4 * slices, is_interleaved=True, pairs=6),
        Design(f"{slices} slices, 4 to 12 pairs, equal contention", slices, is_interleaved=True, is_adjusted=True),
        Design(f"{slices} slices, 6 pairs, equal contention", slices, True, pairs=6, is_adjusted=True),
        Design(f"{2 * slices} slices, 6 pairs, equal contention", 2 * slices, True, pairs=6, is_adjusted=True),
        Design(f"{4 * slices} slices, 6 pairs, equal contention", 4 * slices, True, pairs=6, is_adjusted=True),
        *(
            Design(
                f"{2 * slices} slices, {first} to {last} pairs, smallest effect {100 * effect:g} %",
                2 * slices,
                is_interleaved=True,
                first=first,
                last=last,
                min_effect=effect,
            )
            for effect in (MIN_EFFECT, RECIPE_EFFECT)
            for first, last in ((4, 8), (4, 11), (7, 11), (7, 12))
        ),
    )


def _values(pairs: Sequence[Pair], name: str, side: str) -> Array:
    runs = [getattr(each, side) for pair in pairs for each in pair.slices]
    if name == CONTENTION:
        return np.log([run.contention for run in runs]).reshape(len(pairs), -1)
    values = log_degradation([run.values[name] for run in runs], name)
    assert values is not None
    return values.reshape(len(pairs), -1)


def _split_row(split: NoiseSplit) -> dict[str, Any]:
    percent = {name: round(100 * math.sqrt(getattr(split, name)), 2) for name in ("launch", "drift", "within")}
    pair = {"separate": split.separate(split.slices), "interleaved": split.interleaved(split.slices)}
    return {"metric": split.name, **percent, **{f"pair_{name}": round(100 * each, 2) for name, each in pair.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="The file of `gate_pairs`.")
    parser.add_argument(
        "--noise",
        type=float,
        nargs="*",
        default=[2.0, 4.0],
        help="Noise of a run in %%, in addition to the measured noise.",
    )
    parser.add_argument("--comparisons", type=int, default=500)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, help="Write the measured pairs and both tables to this file.")
    args = parser.parse_args()
    content = json.loads(args.measured.read_text())
    pairs = pairs_of(content)
    components = [_split_row(each) for each in split_noise(pairs, METRICS)]
    for line in components:
        print(json.dumps(line))
    rows = []
    for noise in (None, *args.noise):
        mixture = NoiseMixture.of(with_contention(pairs), None if noise is None else noise / 100)
        for design in designs(content["slices"]):
            for effect in EFFECTS:
                random = np.random.default_rng([args.seed, round(100 * effect)])
                found = outcomes(mixture, design, effect, args.comparisons, random)
                rows.append({"run_noise_percent": noise, "design": design.name, "effect": effect, **asdict(found)})
                print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        write_json(args.out, content | {"components_percent": components, "seed": args.seed, "power": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
