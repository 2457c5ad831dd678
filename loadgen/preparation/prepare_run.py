"""Prepares a run before its first request: facts about the target, vocabulary, workload, length control."""

from dataclasses import dataclass

from loadgen.config.bench_config import BenchConfig
from loadgen.dialects.dialect import Sampling
from loadgen.dialects.registry import open_dialect
from loadgen.dialects.structured_dialect import check_structures
from loadgen.errors import TargetError, UsageError
from loadgen.preparation.cache_facts import cache_facts
from loadgen.preparation.length_check import LengthCheck, check_first_prompts, length_estimate
from loadgen.preparation.length_control import choose_length_control, make_sampling
from loadgen.preparation.token_counter import TokenCounter, open_counter
from loadgen.progress import ProgressDisplay
from loadgen.target.connection_probe import keeps_connections
from loadgen.target.control import ControlClient
from loadgen.target.metrics_source import open_metrics_sources
from loadgen.target.server_kind import OWN, VLLM
from loadgen.target.target import Target, TargetFacts
from loadgen.workloads import workload, workload_files
from loadgen.workloads.prompts.prompts_file import FilePrompts
from loadgen.workloads.prompts.vocabulary import (
    CalibrationError,
    Vocabulary,
    calibrate,
    calibrate_sparingly,
)
from loadgen.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Everything that is known before the first request."""

    facts: TargetFacts
    work: Workload
    vocabulary: Vocabulary | None
    counter: TokenCounter | None
    answer_tokens: list[int | None] | None
    length_check: LengthCheck | None
    length_control: str
    sampling: Sampling
    reuses_connections: bool
    estimate: str | None = None


LISTS_ADAPTERS = (OWN, VLLM)
IMAGE_APIS = ("openai-chat", "tgi")
"""The APIs whose requests can have synthetic images."""


def prepare_run(config: BenchConfig, target: Target, progress: ProgressDisplay) -> PreparedRun:
    """Raises UsageError for a wrong workload, TargetError if the server does not answer."""
    facts = target.facts(config.api, config.model, config.engine)
    length_control = choose_length_control(config, facts)
    check_structures(config, facts.api)
    check_images(config, facts.api)
    control = target.control()
    try:
        check_adapters(config, control, facts)
        counter = open_counter(config, control, facts) if workload.needs_vocabulary(config) else None
        vocabulary = vocabulary_of(target, counter, facts.api) if counter is not None else None
        estimate = length_estimate(counter, vocabulary, config.text_key) if counter and vocabulary else None
        answer_tokens = _answer_tokens(config, control, facts)
        with open_metrics_sources([target.url], target.access, config.metrics_url) as sources:
            cache = cache_facts(config, facts, control, vocabulary, sources)
        work = workload.build(config, vocabulary, facts.limits, answer_tokens, cache)
        length_check = check_first_prompts(work, counter)
        check_fields(work, facts)
    finally:
        control.close()
    if length_control == "capped":
        progress.show("answer lengths are capped, not forced: the server may end an answer earlier")
    if length_check is not None and not length_check.is_exact:
        progress.show(f"prompt lengths differ by up to {length_check.largest_error} tokens with this tokenizer")
    if estimate is not None:
        progress.show(f"prompt lengths {estimate}")
    if work.times_ns is not None and not work.times_ns:
        raise UsageError("the schedule has no requests: the duration is shorter than the first arrival")
    sampling = make_sampling(config, facts, length_control)
    reuses_connections = facts.kind.keeps_connections or keeps_connections(target, open_dialect(facts.api, sampling))
    if not reuses_connections:
        progress.show("the server closes connections after its answers: every request opens a new one")
    return PreparedRun(
        facts,
        work,
        vocabulary,
        counter,
        answer_tokens,
        length_check,
        length_control,
        sampling,
        reuses_connections,
        estimate,
    )


def check_adapters(config: BenchConfig, control: ControlClient, facts: TargetFacts) -> None:
    """Raises UsageError for an adapter that a server which lists its adapters does not list.

    A server may answer with its base model instead of an error.
    """
    mix = workload.adapters_of(config)
    if mix is None or facts.kind not in LISTS_ADAPTERS:
        return
    found = control.get_json("/v1/models")
    rows = found.get("data") if isinstance(found, dict) else None
    if not isinstance(rows, list):
        return
    listed = [str(row.get("id")) for row in rows if isinstance(row, dict)]
    missing = [name for name, _ in mix.shares if name not in listed]
    if missing:
        raise UsageError(f"the server has no adapter {missing[0]!r}; /v1/models lists {', '.join(listed) or 'nothing'}")


def check_images(config: BenchConfig, api: str) -> None:
    """Raises UsageError if requests have images but their API has none."""
    if config.images is not None and api not in IMAGE_APIS:
        raise UsageError(
            f"`images` is {config.images}, but API {api!r} carries none; give --api {' or '.join(IMAGE_APIS)}"
        )


def check_fields(work: Workload, facts: TargetFacts) -> None:
    """Raises UsageError if a row of a prompts file has a part that the API cannot carry."""
    if not isinstance(work.prompts, FilePrompts):
        return
    dialect = open_dialect(facts.api, Sampling())
    for number, prompt in enumerate(work.first(len(work.prompts.rows)), start=1):
        refused = dialect.refused(prompt)
        if refused is not None:
            raise UsageError(
                f"prompt {number} of {work.prompts.name!r} has {refused}, which API {facts.api!r} does not take; "
                "remove it, or give another --api"
            )


def vocabulary_of(target: Target, counter: TokenCounter, api: str) -> Vocabulary:
    """The words of prompts; made once for each launch of a server, whose tokenizer stays the same."""
    if target.process is None:
        return make_vocabulary(counter)
    key = f"{api} {counter.source} {counter.digest}"
    if key not in target.vocabularies:
        target.vocabularies[key] = make_vocabulary(counter)
    return target.vocabularies[key]


def make_vocabulary(counter: TokenCounter) -> Vocabulary:
    """The words that prompts are composed of. Raises UsageError or TargetError."""
    try:
        return calibrate_sparingly(counter.count) if counter.is_costly else calibrate(counter.count)
    except CalibrationError as error:
        raise UsageError(f"cannot make prompts of exact length with {counter.source}: {error}") from error
    except TargetError as error:
        if error.status is None:
            raise
        raise UsageError(
            f"the server does not count tokens ({error}); pass its tokenizer.json as --tokenizer"
        ) from error


def _answer_tokens(config: BenchConfig, control: ControlClient, facts: TargetFacts) -> list[int | None] | None:
    if not workload_files.needs_answer_lengths(config):
        return None
    try:
        return workload_files.answer_lengths(config, open_counter(config, control, facts).count)
    except TargetError as error:
        raise UsageError(f"{error}; pass --tokenizer to count the answers, or --output-tokens") from error
