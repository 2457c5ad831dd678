"""A study whose server is a formula, so that searches run in milliseconds."""

from loadgen.config import BenchConfig
from loadgen.progress import Silent
from tuner.config import TuneConfig
from tuner.evaluate import Bench
from tuner.outcome import Failed, Infeasible, Measured
from tuner.search import Search

LOAD = BenchConfig(concurrency=4, duration=1.0, input_tokens="uniform:64,512", output_tokens="32")

BENCH = Bench(LOAD, 1.0, Silent())


def tokens_per_s(config):
    """Best with a small budget; chunking costs a tenth."""
    budget = config.max_batch_prefill_tokens or 4096
    return (2000.0 - budget / 4) * (0.9 if config.prefill_chunking else 1.0)


class FormulaServer:
    """Evaluates by the formula, dies above a memory share, and can be told to fail or to be interrupted."""

    def __init__(self, *, dies_above=1.0, faults=0, interrupt_at=None):
        self.launches = []
        self.dies_above = dies_above
        self.faults = faults
        self.interrupt_at = interrupt_at

    def __call__(self, config, bench, directory):
        self.launches.append(config)
        if self.interrupt_at == len(self.launches):
            raise KeyboardInterrupt
        if self.faults:
            self.faults -= 1
            return Failed("the disk is full")
        if config.cuda_memory_fraction > self.dies_above and config.max_batch_prefill_tokens is not None:
            return Infeasible("launch", "memory", "not enough memory", "OutOfMemoryError")
        run = directory / "run"
        run.mkdir(parents=True)
        rates = {"output_tokens_per_s": {"value": tokens_per_s(config)}}
        return Measured(run, {"rates": rates, "metrics": {}})


def open_search(folder, server, *, is_leader=True, **study):
    config = TuneConfig.model_validate(
        {
            "study": {"trials": 8, "noise_runs": 0, "guide": "off", **study},
            "server": {"fixed": {"max_input_tokens": 512, "max_total_tokens": 544}},
        }
    )
    return Search.open(folder, config, BENCH, server, is_leader=is_leader)
