"""Facts about the server's prefix cache: the start that all prompts of a run share, and the size of a block."""

import contextlib
import re
import secrets
from collections.abc import Mapping, Sequence

from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import NO_SALT
from loadgen.dialects.dialect import Sampling
from loadgen.dialects.registry import open_dialect
from loadgen.errors import TargetError
from loadgen.preparation.length_control import probe_sampling
from loadgen.preparation.token_counter import open_counter
from loadgen.target.control import ControlClient
from loadgen.target.metrics_source import MetricsSource
from loadgen.target.prompt_start import StartProbe
from loadgen.target.target import TargetFacts
from loadgen.workloads.prompts.planned_cache import CacheFacts
from loadgen.workloads.prompts.prompts_file import marker_text
from loadgen.workloads.prompts.vocabulary import CountTokens, Vocabulary


def cache_facts(
    config: BenchConfig,
    facts: TargetFacts,
    control: ControlClient,
    vocabulary: Vocabulary | None,
    sources: Sequence[MetricsSource] = (),
) -> CacheFacts:
    """The start that all prompts of a run share, and the size of a block of the server's prefix cache."""
    special_tokens, words = (vocabulary.special_tokens, len(vocabulary.words)) if vocabulary is not None else (0, 0)
    has_marker = vocabulary is None and config.salt != NO_SALT and config.prefix_cache != "cold"
    text = marker_text(config.salt or "") if has_marker else ""
    if vocabulary is not None and not has_template(facts):
        return CacheFacts(special_tokens, special_tokens, _block_tokens(facts, sources), words=words)
    count = start_counter(config, facts, control)
    plain = count("")
    marked = count(text) if text else plain
    return CacheFacts(marked, special_tokens, _block_tokens(facts, sources), max(0, marked - plain), words)


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


def _block_tokens(facts: TargetFacts, sources: Sequence[MetricsSource]) -> int:
    """Tokens of a block of the server's prefix cache, by `/info` or by its metrics; 1 if neither reports it."""
    engine = facts.info.get("engine")
    size = engine.get("block_size") if isinstance(engine, Mapping) else None
    if isinstance(size, int) and size > 0:
        return size
    found = next((match for source in sources if (match := VLLM_BLOCK_SIZE.search(source.text() or ""))), None)
    return max(1, int(found[1])) if found else 1
