"""A study whose server is a formula, so that a search takes milliseconds."""

from loadgen.config.bench_config import BenchConfig
from loadgen.progress import SilentProgress
from tuner.config import TuneConfig
from tuner.study.open_search import make_search
from tuner.trial.evaluate import TrialSetup
from tuner.trial.outcome import Failed, Infeasible, MeasuredAttempt

LOAD = BenchConfig(concurrency=4, duration=1.0, input_tokens="uniform:64,512", output_tokens="32")

SETUP = TrialSetup(LOAD, 1.0, SilentProgress())


def tokens_per_s(settings):
    """Best with a small prefill budget; chunked prefill costs a tenth."""
    budget = settings.get("max_batch_prefill_tokens") or 4096
    return (2000.0 - budget / 4) * (0.9 if settings.get("prefill_chunking", True) else 1.0)


class FormulaServer:
    """An `evaluate` by formula: runs out of memory above a memory fraction, fails or is interrupted on request."""

    def __init__(self, *, dies_above=1.0, faults=0, interrupt_at=None):
        self.launches = []
        self.dies_above = dies_above
        self.faults = faults
        self.interrupt_at = interrupt_at

    def __call__(self, settings, setup, directory):
        self.launches.append(settings)
        if self.interrupt_at == len(self.launches):
            raise KeyboardInterrupt
        if self.faults:
            self.faults -= 1
            return Failed("the disk is full")
        fraction = settings.get("cuda_memory_fraction", 1.0)
        if fraction > self.dies_above and "max_batch_prefill_tokens" in settings:
            return Infeasible("launch", "memory", "not enough memory", "OutOfMemoryError")
        run = directory / "run"
        run.mkdir(parents=True)
        rates = {"output_tokens_per_s": {"value": tokens_per_s(settings)}}
        return MeasuredAttempt(run, {"rates": rates, "metrics": {}})


def open_search(folder, server, *, is_leader=True, setup=SETUP, **study):
    config = TuneConfig.model_validate(
        {
            "study": {"trials": 8, "noise_runs": 0, "simulator": "off", **study},
            "server": {"fixed": {"max_input_tokens": 512, "max_total_tokens": 544}},
        }
    )
    return make_search(folder, config, setup, server, is_leader=is_leader)
