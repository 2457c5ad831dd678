"""What a run sends and when: prompts and arrivals from a config, a vocabulary and the server's limits.

Built alike by the command, which hashes and stores it, and by the worker, which sends it.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadgen import arrivals
from loadgen.config import DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS, BenchConfig
from loadgen.datasets.lengths import Lengths
from loadgen.datasets.prompt import Limits, Prompt
from loadgen.datasets.prompts import PromptFile, read_prompts
from loadgen.datasets.synthetic import Synthetic
from loadgen.datasets.traces import READERS, Trace
from loadgen.datasets.vocabulary import Vocabulary, Word

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts in order and, in an open loop, when each starts (ns after the start of the load)."""

    prompts: Iterable[Prompt]
    times_ns: list[int] | None
    digest: str

    @property
    def schedule_hash(self) -> str | None:
        return None if self.times_ns is None else arrivals.schedule_hash(self.times_ns)

    def first(self, count: int) -> list[Prompt]:
        return list(itertools.islice(self.prompts, count))


def needs_vocabulary(config: BenchConfig) -> bool:
    """Whether prompt texts are made to length."""
    return config.workload != "prompts"


def build(config: BenchConfig, vocabulary: Vocabulary | None, limits: Limits) -> Workload:
    """The workload of a config. Raises UsageError when a file is missing or wrong."""
    prompts, source = _prompts(config, vocabulary, limits)
    return Workload(prompts, _times(config, prompts), _digest(config, vocabulary, limits, source))


def _prompts(config: BenchConfig, vocabulary: Vocabulary | None, limits: Limits) -> tuple[Iterable[Prompt], Any]:
    """The prompts, and what of their source goes into the digest."""
    match config.workload:
        case "prompts":
            assert config.prompts_file is not None, "BenchConfig checks it"
            path = Path(config.prompts_file)
            rows = read_prompts(path)
            output = Lengths.parse(config.output_tokens or DEFAULT_OUTPUT_TOKENS)
            return PromptFile(path.stem, rows, output, limits, config.seed), [asdict(row) for row in rows]
        case "azure_llm" | "mooncake":
            assert config.trace_file is not None, "BenchConfig checks it"
            assert vocabulary is not None, "made where `needs_vocabulary`"
            trace = READERS[config.workload](Path(config.trace_file), config.trace_limit)
            return Trace(config.workload, trace, vocabulary, limits, config.seed), [asdict(row) for row in trace]
        case "synthetic":
            assert vocabulary is not None, "made where `needs_vocabulary`"
            lengths = (config.input_tokens or DEFAULT_INPUT_TOKENS, config.output_tokens or DEFAULT_OUTPUT_TOKENS)
            parsed = [Lengths.parse(text) for text in lengths]
            return Synthetic(vocabulary, parsed[0], parsed[1], limits, config.seed), lengths


def _times(config: BenchConfig, prompts: Iterable[Prompt]) -> list[int] | None:
    process = _process(config, prompts)
    if process is None:
        return None
    return arrivals.cut(
        process.times(config.seed),
        warmup_ns=round(config.warmup_s * NS_PER_S),
        duration_ns=None if config.duration_s is None else round(config.duration_s * NS_PER_S),
        requests=config.requests,
    )


def _process(config: BenchConfig, prompts: Iterable[Prompt]) -> arrivals.ArrivalSchedule | None:
    """The arrivals of an open loop; None for a closed one."""
    rows = len(prompts.rows) if isinstance(prompts, Trace) else None
    match config.mode:
        case "constant":
            process: arrivals.ArrivalSchedule = arrivals.Constant(config.rate or 0.0)
        case "poisson" | "gamma":
            process = arrivals.Gamma(config.rate or 0.0, config.burstiness)
        case "burst":
            process = arrivals.Burst(config.requests or 0)
        case "trace":
            assert isinstance(prompts, Trace), "BenchConfig checks it"
            return arrivals.Replay([row.arrival_ns for row in prompts.rows], config.time_scale)
        case _:
            return None
    return process if rows is None else arrivals.AtMost(process, rows)


def _digest(config: BenchConfig, vocabulary: Vocabulary | None, limits: Limits, source: Any) -> str:
    """Equal for two runs that send the same prompts in the same order."""
    parts = {
        "workload": config.workload,
        "seed": config.seed,
        "source": source,
        "vocabulary": None if vocabulary is None else asdict(vocabulary),
        "limits": asdict(limits),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def vocabulary_from_json(value: dict[str, Any] | None) -> Vocabulary | None:
    """The inverse of `dataclasses.asdict`, for the way to the worker."""
    if value is None:
        return None
    return Vocabulary(
        special_tokens=value["special_tokens"],
        openers=tuple(Word(**word) for word in value["openers"]),
        words=tuple(Word(**word) for word in value["words"]),
        filler=value["filler"],
    )
