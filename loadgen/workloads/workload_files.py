"""The files and lengths of a load: read and checked before a server is started."""

from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.config.file_settings import DEFAULT_SHAREGPT_ROWS
from loadgen.config.workload_settings import (
    DEFAULT_INPUT_TOKENS,
    DEFAULT_OUTPUT_TOKENS,
    FILE_WORKLOADS,
    TRACE_WORKLOADS,
)
from loadgen.errors import UsageError
from loadgen.workloads.lengths import Independent, Joint, Lengths, PairedLengths, read_pairs
from loadgen.workloads.prompts.prompts_file import (
    Columns,
    Conversation,
    read_prompts,
    read_sharegpt,
)
from loadgen.workloads.prompts.tokenizer_file import TokenizerFile
from loadgen.workloads.prompts.vocabulary import CountTokens
from loadgen.workloads.structured import structure_of
from loadgen.workloads.traces import READERS, LengthRange, RowChoice


def needs_answer_lengths(config: BenchConfig) -> bool:
    """Whether the answers of a file must be counted before `build`."""
    return config.workload == "sharegpt" and (config.output_tokens is None or config.has_length_filter)


def answer_lengths(config: BenchConfig, count: CountTokens) -> list[int | None]:
    """Tokens of each answer of a ShareGPT file, without special ones; None for filtered conversations."""
    special = count("")
    choice = row_choice(config)
    lengths: list[int | None] = []
    for row in sharegpt_rows(config):
        answer_tokens = max(1, count(row.answer) - special)
        is_in = answer_tokens in choice.output_tokens and count(row.question) in choice.input_tokens
        lengths.append(answer_tokens if is_in else None)
    return lengths


def row_choice(config: BenchConfig) -> RowChoice:
    """The rows of its file that a load uses."""
    return RowChoice(
        skip=config.trace_skip,
        limit=config.trace_limit,
        input_tokens=LengthRange(config.min_input_tokens, config.max_input_tokens),
        output_tokens=LengthRange(config.min_output_tokens, config.max_output_tokens),
        models=config.trace_model,
        log_types=config.trace_log_type,
    )


def sharegpt_rows(config: BenchConfig) -> list[Conversation]:
    end = config.trace_skip + (config.trace_limit or DEFAULT_SHAREGPT_ROWS)
    return read_sharegpt(Path(config.prompts_file or ""), end)[config.trace_skip :]


def check_files(config: BenchConfig) -> None:
    """Read the files of a load (prompts, lengths, schemas, tokenizer) before a server is started for it.

    Raises UsageError naming the file.
    """
    if config.workload in TRACE_WORKLOADS:
        READERS[config.workload](Path(config.trace_file or ""), row_choice(config))
    elif config.workload == "prompts":
        read_prompts(Path(config.prompts_file or ""), Columns(config.prompt_column, config.output_tokens_column))
    elif config.workload in FILE_WORKLOADS:
        sharegpt_rows(config)
    else:
        paired_lengths(config)
    if config.tokenizer is not None:
        TokenizerFile.read(config.tokenizer)
    structure_of(config)


def paired_lengths(config: BenchConfig) -> tuple[PairedLengths, Any]:
    """The lengths of generated prompts, and their part of the digest. Raises UsageError."""
    if config.length_pairs is not None:
        try:
            pairs = read_pairs(Path(config.length_pairs))
        except ValueError as error:
            raise UsageError(f"`length_pairs`: {error}") from error
        return Joint(pairs), pairs
    texts = (config.input_tokens or DEFAULT_INPUT_TOKENS, config.output_tokens or DEFAULT_OUTPUT_TOKENS)
    own, output = (Lengths.parse(text) for text in texts)
    return Independent(own, output), [described(own), described(output), own.values, output.values]


def described(lengths: Lengths) -> str:
    """A length distribution for the digest, without its file's path: the content counts."""
    return lengths.kind if lengths.values else str(lengths)
