"""Builds the prompts and arrivals of a run from a config, a vocabulary and the server's limits.

The command builds the workload to hash and store it; each worker builds the same one to send it.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import NO_SALT
from loadgen.config.durations import parse_stages
from loadgen.config.workload_settings import (
    DEFAULT_IMAGE_SIZE,
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_PREFIX_GROUPS,
    DEFAULT_PREFIX_TOKENS,
    DEFAULT_TURNS,
    FILE_WORKLOADS,
    TRACE_WORKLOADS,
)
from loadgen.errors import UsageError
from loadgen.workloads import arrivals
from loadgen.workloads.adapter_mix import AdapterMix, parse_names, parse_share, zipf_shares
from loadgen.workloads.lengths import Lengths
from loadgen.workloads.prompts.images import ImageMix
from loadgen.workloads.prompts.installed import WORKLOAD_NAMES, GeneratedLoad, installed_prompts
from loadgen.workloads.prompts.multi_turn import MultiTurn
from loadgen.workloads.prompts.planned_cache import NO_FACTS, CacheFacts, planned
from loadgen.workloads.prompts.prompt import Prompt, ServerLimits
from loadgen.workloads.prompts.prompts_file import (
    Columns,
    FilePrompts,
    PromptRow,
    read_prompts,
    shuffled,
)
from loadgen.workloads.prompts.shared_prefix import SharedPrefix
from loadgen.workloads.prompts.synthetic import Synthetic
from loadgen.workloads.prompts.synthetic_image import parse_size
from loadgen.workloads.prompts.vocabulary import Vocabulary, Word
from loadgen.workloads.traces import MOONCAKE_BLOCK_TOKENS, READERS, TracePrompts
from loadgen.workloads.workload_files import described, paired_lengths, row_choice, sharegpt_rows

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts in order and, in an open loop, when each starts (ns after the start of the load)."""

    prompts: Iterable[Prompt]
    schedule: arrivals.Schedule | None
    digest: str
    cache: CacheFacts = NO_FACTS
    prefix_cache: str = "natural"
    keeps_answers: bool = False
    adapters: AdapterMix | None = None
    images: ImageMix | None = None

    @property
    def times_ns(self) -> list[int] | None:
        """The arrivals of warm-up and window; None in a closed loop."""
        return None if self.schedule is None else self.schedule.times_ns

    @property
    def schedule_hash(self) -> str | None:
        """The digest of the arrivals of warm-up and window."""
        return None if self.times_ns is None else arrivals.schedule_hash(self.times_ns)

    @property
    def num_prompts(self) -> int | None:
        """The number of prompts; None if they are endless."""
        return _num_rows(self.prompts)

    def planned(self) -> Iterator[Prompt]:
        """The prompts and those of the drain, with the tokens in a prefix cache without a limit when they are sent.

        In the drain, a trace starts again from its first row, with other texts.
        """
        sent_before = self.shared_prefixes() if self.prefix_cache == "warm" else []
        prompts = self.prompts.endless() if isinstance(self.prompts, TracePrompts) else self.prompts
        return planned(map(self._completed, prompts), self.cache, sent_before, keeps_answers=self.keeps_answers)

    def _completed(self, prompt: Prompt) -> Prompt:
        """The prompt with its adapter and images."""
        if self.adapters is None and self.images is None:
            return prompt
        adapter = None if self.adapters is None else self.adapters.of(prompt)
        return replace(prompt, adapter=adapter, images=() if self.images is None else self.images.of(prompt))

    def first(self, count: int) -> list[Prompt]:
        return list(itertools.islice(self.prompts, count))

    def scheduled(self) -> list[Prompt]:
        """The prompt at each of the times: every request, or the first turn of every session."""
        first_turns = (prompt for prompt in self.prompts if prompt.turn == 0)
        return list(itertools.islice(first_turns, len(self.times_ns or ())))

    def shared_prefixes(self) -> list[Prompt]:
        """The prompts that warm the server's prefix cache; empty if the workload has no known prefixes."""
        return self.prompts.prefixes() if isinstance(self.prompts, SharedPrefix) else []


def needs_vocabulary(config: BenchConfig) -> bool:
    """Whether prompt texts are generated to length."""
    return config.workload not in FILE_WORKLOADS


def build(
    config: BenchConfig,
    vocabulary: Vocabulary | None,
    limits: ServerLimits,
    answer_tokens: Sequence[int | None] | None = None,
    cache: CacheFacts = NO_FACTS,
) -> Workload:
    """The workload of a config; `answer_tokens` come from `answer_lengths`, `cache` from the server.

    Raises UsageError if a file is missing or wrong.
    """
    if config.workload in FILE_WORKLOADS:
        prompts, source = _from_file(config, limits, answer_tokens)
    else:
        assert vocabulary is not None, "required by `needs_vocabulary`"
        prompts, source = _generated(config, vocabulary, limits)
    digest = _digest(config, vocabulary, limits, source)
    return Workload(
        prompts,
        _schedule(config, prompts),
        digest,
        cache,
        config.prefix_cache,
        keeps_answers=config.assistant == "real",
        adapters=adapters_of(config),
        images=images_of(config),
    )


def adapters_of(config: BenchConfig) -> AdapterMix | None:
    """The adapters of a load; None if every request uses the base model."""
    if config.adapters is not None:
        names = parse_names(config.adapters)
        return AdapterMix(zipf_shares(names, config.adapter_zipf or 0.0), config.seed)
    return AdapterMix(tuple(map(parse_share, config.adapter)), config.seed) if config.adapter else None


def images_of(config: BenchConfig) -> ImageMix | None:
    """The images of a load; None without any."""
    if config.images is None:
        return None
    width, height = parse_size(config.image_size or DEFAULT_IMAGE_SIZE)
    return ImageMix(config.images, width, height, config.images_shared or 0.0, config.text_key)


def _from_file(
    config: BenchConfig, limits: ServerLimits, answer_tokens: Sequence[int | None] | None
) -> tuple[Iterable[Prompt], Any]:
    """The prompts of a file, and their part of the digest."""
    path = Path(config.prompts_file or "")
    if config.workload == "prompts":
        rows = read_prompts(path, Columns(config.prompt_column, config.output_tokens_column))
    else:
        rows = _conversations(config, answer_tokens)
    if config.prompts_order == "shuffled":
        rows = shuffled(rows, config.seed)
    output = Lengths.parse(config.output_tokens or DEFAULT_OUTPUT_TOKENS)
    salt = None if config.salt == NO_SALT else config.salt
    prompts = FilePrompts(path.stem, rows, output, limits, config.seed, salt, config.prefix_cache == "cold")
    return prompts, [described(output), *output.values, [row.described() for row in rows]]


def _conversations(config: BenchConfig, answer_tokens: Sequence[int | None] | None) -> list[PromptRow]:
    """The questions of a ShareGPT file with the lengths of their answers. Raises UsageError if none is left."""
    rows = sharegpt_rows(config)
    if answer_tokens is None:
        return [PromptRow(row.question) for row in rows]
    known = zip(rows, answer_tokens, strict=True)
    is_own = config.output_tokens is None
    selected = [PromptRow(row.question, output_tokens=n if is_own else None) for row, n in known if n is not None]
    if not selected:
        raise UsageError(f"{config.prompts_file}: no conversation passes the filters")
    return selected


def _generated(config: BenchConfig, vocabulary: Vocabulary, limits: ServerLimits) -> tuple[Iterable[Prompt], Any]:
    """Prompts generated to length, and their part of the digest."""
    is_cold = config.prefix_cache == "cold"
    if config.workload in TRACE_WORKLOADS:
        trace = READERS[config.workload](Path(config.trace_file or ""), row_choice(config))
        block_tokens = config.block_tokens or MOONCAKE_BLOCK_TOKENS
        prompts = TracePrompts(
            config.workload,
            trace,
            vocabulary,
            limits,
            config.seed,
            config.text_key,
            is_cold,
            config.trace_loop,
            block_tokens,
        )
        return prompts, [[asdict(row) for row in trace], block_tokens]
    lengths, source = paired_lengths(config)
    load = GeneratedLoad(vocabulary, lengths, limits, config.seed, config.text_key, is_cold)
    if config.workload == "shared_prefix":
        num_groups = config.prefix_groups or DEFAULT_PREFIX_GROUPS
        prefix_tokens, is_zipf = config.prefix_tokens or DEFAULT_PREFIX_TOKENS, config.prefix_popularity == "zipf"
        return SharedPrefix(load, num_groups, prefix_tokens, is_zipf), [source, num_groups, prefix_tokens, is_zipf]
    if config.workload == "multi_turn":
        turns = Lengths.parse(config.turns or DEFAULT_TURNS)
        return MultiTurn(load, turns), [source, described(turns), turns.values]
    if config.workload == "synthetic":
        return Synthetic(load), source
    return installed_prompts(config.workload, load), [source, WORKLOAD_NAMES.entry(config.workload).value]


def _schedule(config: BenchConfig, prompts: Iterable[Prompt]) -> arrivals.Schedule | None:
    process = _process(config, prompts)
    if process is None:
        return None
    return arrivals.schedule(
        process.times(config.seed),
        warmup_ns=round(config.warmup_s * NS_PER_S),
        duration_ns=None if config.duration_s is None else round(config.duration_s * NS_PER_S),
        requests=config.requests,
        rows=_num_rows(prompts),
        drain_ns=round(config.drain_s * NS_PER_S),
    )


def _num_rows(prompts: Iterable[Prompt]) -> int | None:
    return len(prompts.rows) if isinstance(prompts, TracePrompts) and not prompts.loops else None


def _process(config: BenchConfig, prompts: Iterable[Prompt]) -> arrivals.ArrivalProcess | None:
    """The arrivals of an open loop; None for a closed one."""
    match config.mode:
        case "constant":
            return arrivals.Constant(config.rate or 0.0)
        case "stages" if config.is_open_loop:
            return arrivals.StagedRate(parse_stages(config.stages or ""))
        case "poisson" | "gamma" | "sessions":
            return arrivals.Gamma(config.rate or 0.0, config.burstiness)
        case "burst":
            return arrivals.Burst(config.requests or 0)
        case "trace":
            assert isinstance(prompts, TracePrompts), "BenchConfig checks it"
            return arrivals.Replay([row.arrival_ns for row in prompts.rows], config.time_scale)
        case _:
            return None


def text_hash(workload_hash: str, config: BenchConfig) -> str:
    """Equal for runs that send the same bytes: the workload and the salt."""
    return hashlib.sha256(f"{workload_hash}:{config.text_key}:{config.salt}".encode()).hexdigest()


def _digest(config: BenchConfig, vocabulary: Vocabulary | None, limits: ServerLimits, source: Any) -> str:
    """Equal for runs whose prompts have the same lengths, order and sharing; their texts also depend on the salt."""
    images = images_of(config)
    parts = {
        "workload": config.workload,
        "seed": config.seed,
        "prefix_cache": config.prefix_cache,
        "source": source,
        "vocabulary": None if vocabulary is None else asdict(vocabulary),
        "limits": asdict(limits),
        **({"adapters": adapters.shares} if (adapters := adapters_of(config)) else {}),
        **({"images": [images.count, images.width, images.height, images.shared]} if images else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def vocabulary_from_json(value: dict[str, Any] | None) -> Vocabulary | None:
    """The inverse of `dataclasses.asdict`."""
    if value is None:
        return None
    return Vocabulary(
        special_tokens=value["special_tokens"],
        openers=tuple(Word(**word) for word in value["openers"]),
        words=tuple(Word(**word) for word in value["words"]),
        filler=value["filler"],
    )
