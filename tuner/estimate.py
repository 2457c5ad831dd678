"""What a study will cost: how many launches of each kind, and about how long. Pure."""

from dataclasses import dataclass

from loadgen.config import BenchConfig
from tuner.config import TRIALS, WIDE, WIDE_TRIALS, StudySection, TuneConfig

# A start of the bundled server on the tiny preset and its stop, where nothing has been measured yet.
START_S = 8.0
DEFAULT_WARMUP_S, DEFAULT_DURATION_S = 0.0, 30.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """The launches of a study and the seconds that each takes."""

    noise: int
    search: int
    confirming: int
    seconds_each: float

    def at(self, seconds_each: float) -> "Estimate":
        """The same plan at what a launch has been measured to take."""
        return Estimate(self.noise, self.search, self.confirming, seconds_each)

    @property
    def launches(self) -> int:
        return self.noise + self.search + self.confirming

    @property
    def hours(self) -> float:
        return self.launches * self.seconds_each / 3600

    def __str__(self) -> str:
        return (
            f"{self.launches} launches: {self.noise} for noise, {self.search} to search, {self.confirming} to confirm; "
            f"about {self.seconds_each:.0f} s each, {self.hours:.2f} hours"
        )


def num_trials(study: StudySection, num_parameters: int) -> int:
    """The budget of a search where the file does not say."""
    if study.trials is not None:
        return study.trials
    return WIDE_TRIALS if num_parameters > WIDE else TRIALS


def estimate(config: TuneConfig, load: BenchConfig, trials: int, start_s: float = START_S) -> Estimate:
    """The plan of a study, before its first launch."""
    confirming = config.confirm.rounds * (1 + config.confirm.finalists) if config.confirm.rounds else 0
    duration_s = load.duration if load.duration is not None else DEFAULT_DURATION_S
    warmup_s = load.warmup if load.warmup is not None else DEFAULT_WARMUP_S
    return Estimate(config.study.noise_runs, trials, confirming, start_s + warmup_s + duration_s)
