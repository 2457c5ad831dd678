"""A study with every kind of trial, drawn from a seed."""

import dataclasses
import random

from reports.document import Estimate, VerdictLine
from reports.stats.estimators import Interval
from reports.study import Contribution, Knob, StudyData, StudyTrial, TrialOutcome, paired_change, setting_text

KNOBS = (
    Knob("max_batch_prefill_tokens", 4096, "log", "from the model"),
    Knob("cpu_memory_gib", 4.0, "log"),
    Knob("waiting_served_ratio", 0.3),
    Knob("prefill_chunking", True, "category"),
    Knob("max_waiting_tokens", 20),
)
BASELINE = {"max_batch_prefill_tokens": None, "cpu_memory_gib": 4.0, "waiting_served_ratio": 0.3}
BASELINE |= {"prefill_chunking": True, "max_waiting_tokens": 20}


def sample_study(num_trials: int = 32, seed: int = 5, *, is_confirmed: bool = True) -> StudyData:
    """The objective grows with the prefill budget up to 2,048 and with memory; a launch with too much memory fails."""
    random_ = random.Random(seed)
    trials = [_trial(0, BASELINE, random_, 0.0)]
    for number in range(1, num_trials):
        settings = {
            "max_batch_prefill_tokens": random_.choice([256, 512, 1024, 2048, 4096, 8192]),
            "cpu_memory_gib": round(random_.uniform(0.5, 12.0), 2),
            "waiting_served_ratio": round(random_.uniform(0.1, 2.0), 2),
            "prefill_chunking": random_.random() < 0.5,
            "max_waiting_tokens": random_.randint(0, 40),
        }
        trials.append(_trial(number, settings, random_, 40.0 * number))
    valued = [each for each in trials if each.outcome is TrialOutcome.FEASIBLE]
    winner = max(valued, key=lambda each: each.value or 0.0)
    at_s, number = 40.0 * num_trials, num_trials
    for round_ in range(1, 5 if is_confirmed else 1):
        for original in (trials[0], winner):
            again = _trial(number, dict(original.settings), random_, at_s)
            trials.append(_confirming(again, original.number, round_))
            at_s, number = at_s + 40.0, number + 1
    launches = [[each for each in trials if each.confirms == number] for number in (0, winner.number)]
    pair = launches if is_confirmed else [[trials[0]], [winner]]
    gain = paired_change(*pair, "output_tokens_per_s", "output_tokens_per_s")
    assert gain is not None
    changed = [knob for knob in KNOBS if knob.value_of(winner) != knob.value_of(trials[0])]
    flags = " ".join(f"--{knob.name.replace('_', '-')} {setting_text(knob, winner)}" for knob in changed)
    percent = Estimate(*(100 * (each - 1) for each in (gain.value, gain.lo, gain.hi)), is_change=True)
    within = f", 95 % interval {percent.interval} %" if percent.interval else ""
    sentence = f"{percent.text} % output_tokens_per_s{within}."
    return StudyData(
        name="sample",
        verdict=VerdictLine("improvement", "Better settings found", sentence, ("Guards on answers were off.",)),
        objective="output_tokens_per_s",
        knobs=KNOBS,
        trials=tuple(trials),
        limits=("ttft_p95_ms <= 500", "error_rate <= 0.01"),
        baseline=0,
        winner=winner.number,
        gain=gain,
        noise=0.02,
        is_confirmed=is_confirmed,
        contributions=(Contribution("cpu_memory_gib", Interval(1.18, 1.12, 1.24)),),
        facts=(("Machine", (("CPU", "2 cores"),)), ("Load", (("hash", "ab12"),))),
        commands=("tgi-tune run space.toml --trials 32",),
        command=f"text-generation-launcher --model-id preset:tiny-llama {flags}",
        load="closed, 8 users, input tokens 64, output tokens 24",
    )


def _confirming(trial: StudyTrial, original: int, round_: int) -> StudyTrial:
    return dataclasses.replace(trial, confirms=original, round=round_)


def _trial(number: int, settings: dict[str, object], random_: random.Random, at_s: float) -> StudyTrial:
    budget = float(settings["max_batch_prefill_tokens"] or 1024)  # type: ignore[arg-type]
    memory = float(settings["cpu_memory_gib"])  # type: ignore[arg-type]
    if memory > 10.5:
        return StudyTrial(
            number,
            settings,
            TrialOutcome.NOT_SERVED,
            phase="launch",
            cause="memory",
            reason="the server ended with exit code 1",
            log_line="RuntimeError: Not enough memory to handle 4096 prefill tokens",
            started_s=at_s,
            spent_s={"launch": 6.0},
        )
    value = (900 + 300 * min(budget, 2048) / 2048 + 60 * min(memory, 6)) * random_.gauss(1, 0.02)
    ttft = 180 + 0.06 * budget * random_.gauss(1, 0.1)
    outcome = TrialOutcome.FEASIBLE if ttft <= 500 else TrialOutcome.VIOLATED
    return StudyTrial(
        number,
        settings,
        outcome,
        value=value,
        metrics={"ttft_p95_ms": ttft, "tpot_p50_ms": 18 * random_.gauss(1, 0.05), "error_rate": 0.0},
        missed=() if ttft <= 500 else ("ttft_p95_ms <= 500",),
        started_s=at_s,
        spent_s={"launch": 6.0, "warm": 4.0, "measure": 25.0},
    )
