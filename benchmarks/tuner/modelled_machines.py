"""Two modelled servers, to evaluate the simulator: its cost model cannot fit their step times exactly.

`tight` is a 24 GB device with 48 users, `roomy` an 80 GB device with 160 users. The true step times have effects that
the cost model lacks: prefill is rounded to tiles and decode rows to warps, batches are padded to captured graphs, and
there are gaps between steps outside the server's timers and pauses for garbage collection. Every launch has a random
speed factor and loses some memory. Six parameters are searched.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.scheduling.step_work import StepWork
from tuner.simulator.fitting.cost_model import CostModel
from tuner.simulator.fitting.fit_steps import fit, rescaled
from tuner.simulator.fitting.traced_steps import TracedSteps
from tuner.simulator.residual_candidates import KnobRange, PredictedCandidate
from tuner.simulator.simulated_metrics import metrics_of
from tuner.simulator.simulation import PlannedRequest, SimulatedLoad, Simulation
from tuner.simulator.step_law import StepLaw
from tuner.trial.objective import Limit, Objective

GIB = 2**30
GRAPHS = (1, 2, 4, 8, 16, 32)
METRICS = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "tpot_mean_ms")
REQUESTS = 400
KNOBS = (
    KnobRange("max_batch_prefill_tokens", 2048, 32768, log=True),
    KnobRange("max_waiting_tokens", 1, 100, log=True),
    KnobRange("waiting_served_ratio", 0.05, 3.0, log=True),
    KnobRange("max_batch_size", 8, 256, log=True),
    KnobRange("cuda_memory_fraction", 0.80, 1.0),
    KnobRange("quantize", choices=("none", "eetq", "fp8", "bitsandbytes", "bitsandbytes-nf4")),
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization: bytes of a weight, and relative cost of prefill and decode."""

    bytes_per_weight: float
    prefill: float
    decode: float


SCHEMES = {
    "none": Scheme(2.0, 1.0, 1.0),
    "eetq": Scheme(1.05, 1.12, 0.74),
    "fp8": Scheme(1.05, 0.82, 0.72),
    "bitsandbytes": Scheme(1.1, 1.7, 2.1),
    "bitsandbytes-nf4": Scheme(0.6, 1.5, 1.25),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and its load. speed: divides every step time. limits: of the search."""

    name: str
    device_gib: float
    users: int
    weights: float
    kv_bytes: int
    speed: float
    requests: int
    limits: Mapping[str, float] = field(default_factory=dict)

    def pool_tokens(self, settings: Mapping[str, Any], lost: float = 0.0) -> int:
        """The K/V tokens that fit. The simulator computes them, except for the fraction `lost` of a launch."""
        scheme = SCHEMES[settings["quantize"]]
        room = settings["cuda_memory_fraction"] * self.device_gib * GIB * (1 - lost)
        peak = 0.2 * GIB + 220_000 * settings["max_batch_prefill_tokens"]
        left = room - 0.9 * GIB - self.weights * scheme.bytes_per_weight - peak
        return max(0, int(left / self.kv_bytes))

    @property
    def objective(self) -> Objective:
        return Objective("output_tokens_per_s", tuple(Limit(name, max=most) for name, most in self.limits.items()))

    def options(self, settings: Mapping[str, Any], lost: float = 0.0) -> SchedulerOptions:
        return SchedulerOptions(
            settings["max_batch_prefill_tokens"],
            self.pool_tokens(settings, lost),
            settings["waiting_served_ratio"],
            settings["max_waiting_tokens"],
            settings["max_batch_size"],
        )

    def load(self, seed: int = 0) -> SimulatedLoad:
        rng = random.Random(seed)
        planned = [
            PlannedRequest(
                min(1400, max(16, round(rng.lognormvariate(6.2, 0.6)))),
                min(600, max(4, round(rng.expovariate(1 / 150)))),
            )
            for _ in range(self.requests)
        ]
        # The shortest warm-up: the measurement starts when every user has an answer.
        return SimulatedLoad(planned, users=self.users, warmup_ns=1)

    def run(self, settings: Mapping[str, Any], law: StepLaw, *, lost: float = 0.0, seed: int = 0) -> dict[str, float]:
        """Metrics of one simulated launch; empty if no K/V memory is left."""
        if self.pool_tokens(settings, lost) < 2500:
            return {}
        load = self.load(seed)
        run = Simulation(load, [(self.options(settings, lost), law)], max_concurrent_requests=1024).run()
        found = metrics_of(run, METRICS)
        return found if len(found) == len(METRICS) else {}


TIGHT = Machine("tight", 24, 48, 6.7e9, 524_288, 1.0, REQUESTS, {"ttft_p95_ms": 3300.0, "tpot_mean_ms": 40.0})
ROOMY = Machine("roomy", 80, 160, 13e9, 819_200, 1.6, 700, {"ttft_p95_ms": 11_500.0, "tpot_mean_ms": 55.0})
MACHINES = (TIGHT, ROOMY)


class TrueLaw:
    """The true step times of a machine. If `rng` is None, there is no random factor and there are no pauses."""

    def __init__(self, machine: Machine, quantize: str, rng: random.Random | None) -> None:
        scheme = SCHEMES[quantize]
        size = machine.weights / 6.7e9 / machine.speed
        self._prefill, self._decode = scheme.prefill * size, scheme.decode * size
        self._factor = rng.lognormvariate(0, 0.015) if rng is not None else 1.0
        self._rng = rng
        self.kv_ns = 28.0 * size * self._factor

    def without_factor(self) -> None:
        """Set the random factor to its mean."""
        self.kv_ns, self._factor = self.kv_ns / self._factor, 1.0

    def own_ns(self, work: StepWork) -> float:
        """Time of a step inside the server's timers."""
        prompts, tokens, squares, cached, rows, kv, _ = work
        time_ns = 0.0
        if prompts:
            tiles = 128 * math.ceil(tokens / 128)
            time_ns += self._prefill * (11e6 + 4e5 * prompts + 95_000 * tiles + 4.0 * squares + 20 * cached)
        if rows:
            padded = next((size for size in GRAPHS if size >= rows), 0)
            width = padded or 8 * math.ceil(rows / 8)
            launch = 0.0 if padded else 3.5e6
            time_ns += self._decode * (19e6 + launch + 1.1e5 * width + 2e4 * max(0, width - 64))
            time_ns += self.kv_ns / self._factor * kv
        return time_ns * self._factor

    def step_ns(self, work: StepWork) -> float:
        gap_ns = 9e5 + 1.4e4 * (work.rows + work.prompts)
        pause_ns = 35e6 if self._rng is not None and work.prompts and self._rng.random() < 0.04 else 0.0
        return self.own_ns(work) + gap_ns + pause_ns


def sweep_works(machine: Machine, settings: Mapping[str, Any]) -> list[StepWork]:
    """Designed steps within budget and pool."""
    budget, pool = settings["max_batch_prefill_tokens"], machine.pool_tokens(settings)
    works = [
        StepWork(n, n * length, n * length * length)
        for n in (1, 2, 4, 8, 16)
        for length in (64, 256, 1024, 1400)
        if n * length <= budget
    ]
    works += [
        StepWork(rows=rows, kv=rows * context)
        for rows in (1, 2, 4, 8, 16, 32, 48, 64, 80, 128, 192)
        for context in (128, 512, 1500)
        if rows * context <= pool
    ]
    return works


class StepRecorder:
    """Step times that are also recorded, as the step trace of a launch. Strides are off."""

    kv_ns = None

    def __init__(self, law: StepLaw) -> None:
        self._law = law
        self.works: list[StepWork] = []
        self.walls: list[float] = []

    def step_ns(self, work: StepWork) -> float:
        time_ns = self._law.step_ns(work)
        self.works.append(work)
        self.walls.append(time_ns)
        return time_ns


def plain(quantize: str) -> dict[str, Any]:
    """A configuration of the initial design."""
    return {
        "max_batch_prefill_tokens": 4096,
        "max_waiting_tokens": 20,
        "waiting_served_ratio": 0.3,
        "max_batch_size": 256,
        "cuda_memory_fraction": 0.9,
        "quantize": quantize,
    }


def calibrated(machine: Machine, quantize: str, rng: random.Random, *, is_rescaled: bool = True) -> CostModel:
    """The cost model of one calibration launch: fitted to designed steps, rescaled to its load."""
    settings = plain(quantize)
    law = TrueLaw(machine, quantize, rng)
    works = sweep_works(machine, settings) * 3
    rng.shuffle(works)
    model = fit(
        [TracedSteps.of(works, [law.step_ns(work) * rng.lognormvariate(0, 0.02) for work in works])], graph_sizes=GRAPHS
    )
    if not is_rescaled:
        return model
    recorder = StepRecorder(law)
    machine.run(settings, recorder, seed=rng.randrange(2**30))
    return rescaled(model, TracedSteps.of(recorder.works, recorder.walls))


def settings_of(units: Sequence[float]) -> dict[str, Any]:
    """A configuration from one number in 0..1 for each parameter."""
    found: dict[str, Any] = {}
    for knob, unit in zip(KNOBS, units, strict=True):
        if knob.choices:
            found[knob.name] = knob.choices[min(int(unit * len(knob.choices)), len(knob.choices) - 1)]
            continue
        value = knob.low * (knob.high / knob.low) ** unit if knob.log else knob.low + unit * (knob.high - knob.low)
        whole = knob.name not in ("waiting_served_ratio", "cuda_memory_fraction")
        found[knob.name] = round(value) if whole else round(value, 3)
    found["max_batch_prefill_tokens"] = max(2048, found["max_batch_prefill_tokens"] // 64 * 64)
    return found


def random_settings(rng: random.Random) -> dict[str, Any]:
    return settings_of([rng.random() for _ in KNOBS])


def survival(settings: Mapping[str, Any]) -> float:
    """The probability that a launch has enough memory: 0.5 at a memory fraction of 0.965."""
    return 1 / (1 + math.exp((settings["cuda_memory_fraction"] - 0.965) / 0.012))


def true_metrics(machine: Machine, settings: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a configuration without random factor and pauses."""
    law = TrueLaw(machine, settings["quantize"], random.Random(0))
    law.without_factor()
    return machine.run(settings, law)


def predicted(machine: Machine, models: Mapping[str, CostModel], settings: Mapping[str, Any]) -> PredictedCandidate:
    metrics = machine.run(settings, models[settings["quantize"]].law)
    return PredictedCandidate(settings, metrics, survival(settings))


class HiddenLaw:
    """A smooth random function of the parameters that scales metrics; the cost model does not include it.

    Each seed has another function.
    """

    FACTORS: Mapping[str, float] = {
        "output_tokens_per_s": 1.0,
        "tpot_mean_ms": -0.9,
        "ttft_p95_ms": -1.8,
        "ttft_p50_ms": -1.8,
    }

    def __init__(self, deviation: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._deviation = deviation
        self._waves = rng.normal(0, 1 / 0.5, (64, 16))
        self._phases = rng.uniform(0, 2 * math.pi, 64)

    def __call__(self, settings: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, float]:
        place = np.asarray([c for knob in KNOBS for c in knob.coordinates(settings[knob.name])])
        wave = np.cos(self._waves[:, : len(place)] @ place + self._phases).sum() * math.sqrt(2 / 64)
        return {name: value * math.exp(self._deviation * wave * self.FACTORS[name]) for name, value in metrics.items()}
