"""Prepares a run before its first request: facts about the target, vocabulary, workload, length control."""

import contextlib
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import NO_SALT
from loadgen.dialects.dialect import ParsedAnswer, Sampling, merged
from loadgen.dialects.registry import open_dialect
from loadgen.dialects.structured_dialect import check_structures
from loadgen.errors import TargetError, UsageError
from loadgen.progress import ProgressDisplay
from loadgen.target.connection_probe import keeps_connections
from loadgen.target.control import ControlClient
from loadgen.target.metrics_source import MetricsSource, open_metrics_sources
from loadgen.target.prompt_start import StartProbe
from loadgen.target.server_kind import OWN, VLLM
from loadgen.target.target import Target, TargetFacts
from loadgen.workloads import workload
from loadgen.workloads.prompts.planned_cache import CacheFacts
from loadgen.workloads.prompts.prompt import Prompt
from loadgen.workloads.prompts.prompts_file import FilePrompts, marker_text
from loadgen.workloads.prompts.tokenizer_file import TokenizerFile
from loadgen.workloads.prompts.vocabulary import (
    CalibrationError,
    CountTokens,
    Vocabulary,
    calibrate,
    calibrate_sparingly,
)
from loadgen.workloads.workload import Workload

CHECKED_PROMPTS = 16
ESTIMATED_LENGTHS = (32, 128)
# One token of the longer text.
LEAST_ESTIMATE_PERCENT = 1
OPENAI_APIS = ("openai-chat", "openai-completions")
COUNT_EACH_EVENT = {"stream_options": {"continuous_usage_stats": True}}


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts tokens, including special ones. `digest` is that of a tokenizer file.

    `is_costly`: each count is a request that the server answers, so few texts are counted, and no text of the run.
    """

    count: CountTokens
    source: str
    digest: str | None = None
    is_costly: bool = False


@dataclass(frozen=True, slots=True)
class LengthCheck:
    """Generated prompts that were counted again, and the largest difference from their planned length in tokens."""

    checked: int
    largest_error: int

    @property
    def is_exact(self) -> bool:
        return self.largest_error == 0


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
        length_check = _length_check(work, counter)
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


def make_sampling(config: BenchConfig, facts: TargetFacts, length_control: str) -> Sampling:
    """The parameters of the run's requests."""
    counts_each = facts.kind.counts_each_event and config.stream and facts.api in OPENAI_APIS
    return Sampling(
        facts.kind.length_fields if length_control == "forced" else (),
        config.temperature,
        config.seed,
        facts.model,
        config.stream,
        merged(COUNT_EACH_EVENT if counts_each else {}, config.extra_body or {}),
    )


def probe_sampling(config: BenchConfig, facts: TargetFacts) -> Sampling:
    """The parameters of requests before the run, which are not streamed."""
    return Sampling(model=facts.model, streams=False, extra=config.extra_body or {})


def choose_length_control(config: BenchConfig, facts: TargetFacts) -> str:
    """`forced` if the server lists the extensions for it, else `capped`. Raises UsageError."""
    if config.length_control == "forced" and not facts.can_force_length:
        raise UsageError(
            f"`length_control` is 'forced', but {facts.kind.title} cannot force lengths by API {facts.api!r}; use "
            "'capped' or 'auto'"
        )
    if config.length_control == "capped" or not facts.can_force_length:
        return "capped"
    has_length = config.workload != "prompts" or config.output_tokens is not None
    return "forced" if has_length else "capped"


def open_counter(config: BenchConfig, control: ControlClient, facts: TargetFacts) -> TokenCounter:
    """The token counter of a config: a tokenizer file, the server's own route, or the usage of its responses.

    Raises UsageError, TargetError.
    """
    if config.tokenizer is None:
        return _server_counter(config, control, facts)
    file = TokenizerFile.read(config.tokenizer)
    return TokenCounter(file.count, str(file.path), file.digest)


def _server_counter(config: BenchConfig, control: ControlClient, facts: TargetFacts) -> TokenCounter:
    """The server's route that counts tokens; without one, the prompt tokens that responses report."""
    route = facts.kind.tokenize
    if route is not None:
        try:
            control.count_tokens("a", route)
        except TargetError as error:
            if error.status is None:
                raise
        else:
            return TokenCounter(lambda text: control.count_tokens(text, route), route.path)
    return TokenCounter(_count_by_usage(config, control, facts), "usage of responses", is_costly=True)


def _count_by_usage(config: BenchConfig, control: ControlClient, facts: TargetFacts) -> CountTokens:
    """Counts a text by an answer of one token to it."""
    dialect = open_dialect(facts.api, probe_sampling(config, facts))

    def count(text: str) -> int:
        status, body = control.post(dialect.path, dialect.body(Prompt("count", text=text, output_tokens=1)))
        answer = ParsedAnswer()
        if status == 200:
            dialect.read_whole(body, answer)
        if answer.input_tokens is None:
            raise TargetError(f"{dialect.path}: status {status}, and no prompt tokens in `usage`", status)
        return answer.input_tokens

    return count


def length_estimate(counter: TokenCounter, vocabulary: Vocabulary, key: str) -> str | None:
    """How far prompts may be from their planned length, by two texts not of the run; None if all are counted."""
    if not counter.is_costly:
        return None
    texts = {tokens: vocabulary.write(tokens, f"estimate:{key}:{tokens}") for tokens in ESTIMATED_LENGTHS}
    error = max(abs(counter.count(text) - tokens) / tokens for tokens, text in texts.items())
    percent = max(LEAST_ESTIMATE_PERCENT, math.ceil(100 * error))
    return f"estimated (±{percent} %, measured on {len(texts)} texts)"


def _length_check(work: Workload, counter: TokenCounter | None) -> LengthCheck | None:
    """The check of the first prompts; None if counting would send them to the server before the run."""
    if counter is None or counter.is_costly:
        return None
    return check_lengths(work.first(CHECKED_PROMPTS), counter)


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
    if not workload.needs_answer_lengths(config):
        return None
    try:
        return workload.answer_lengths(config, open_counter(config, control, facts).count)
    except TargetError as error:
        raise UsageError(f"{error}; pass --tokenizer to count the answers, or --output-tokens") from error


def check_lengths(prompts: list[Prompt], counter: TokenCounter) -> LengthCheck:
    """Count generated prompts and compare with their planned lengths."""
    errors = [abs(counter.count(prompt.text) - (prompt.input_tokens or 0)) for prompt in prompts]
    return LengthCheck(len(errors), max(errors, default=0))


def cache_facts(
    config: BenchConfig,
    facts: TargetFacts,
    control: ControlClient,
    vocabulary: Vocabulary | None,
    sources: Sequence[MetricsSource] = (),
) -> CacheFacts:
    """The start that all prompts of a run share, and the blocks of the server's prefix cache by its metrics."""
    special_tokens, words = (vocabulary.special_tokens, len(vocabulary.words)) if vocabulary is not None else (0, 0)
    has_marker = vocabulary is None and config.salt != NO_SALT and config.prefix_cache != "cold"
    text = marker_text(config.salt or "") if has_marker else ""
    if vocabulary is not None and not has_template(facts):
        return CacheFacts(special_tokens, special_tokens, _block_tokens(sources), words=words)
    count = start_counter(config, facts, control)
    plain = count("")
    marked = count(text) if text else plain
    return CacheFacts(marked, special_tokens, _block_tokens(sources), max(0, marked - plain), words)


def has_template(facts: TargetFacts) -> bool:
    """Whether the server puts a chat template around the prompts of a run."""
    return open_dialect(facts.api, Sampling()).has_template


def start_counter(config: BenchConfig, facts: TargetFacts, control: ControlClient) -> CountTokens:
    """Counts the tokens before the text of a prompt that begins with a given one, 0 if the server counts none.

    By the tokenizer where there is no chat template, otherwise by probes.
    """
    if not has_template(facts):
        with contextlib.suppress(TargetError):
            return open_counter(config, control, facts).count
    dialect = open_dialect(facts.api, probe_sampling(config, facts))
    return StartProbe(control, dialect, facts.kind, config.salt or secrets.token_hex(8)).tokens


VLLM_BLOCK_SIZE = re.compile(r'vllm:cache_config_info\{[^}]*block_size="(\d+)"')


def _block_tokens(sources: Sequence[MetricsSource]) -> int:
    """Tokens of a block of the server's prefix cache; 1 if no source reports it."""
    found = next((match for source in sources if (match := VLLM_BLOCK_SIZE.search(source.text() or ""))), None)
    return max(1, int(found[1])) if found else 1
