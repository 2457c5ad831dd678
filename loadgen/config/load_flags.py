"""The settings of a load as flags: their sections in `--help`, and which of them only `--help-all` shows."""

import argparse
from collections.abc import Iterable, Mapping

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.config.load_examples import EXAMPLES

COMMON = frozenset(
    (
        *("url", "server", "model_id", "api", "model", "api_key_env"),
        *("profile", "mode", "concurrency", "rate", "stages"),
        *("duration", "requests", "warmup", "converge", "max_errors"),
        *("workload", "input_tokens", "output_tokens", "prefix_tokens", "turns", "prompts_file", "trace_file"),
        *("tokenizer", "stream"),
        *("slo", "cost_per_hour"),
        *("seed", "workers", "label"),
    )
)


def add_flags(
    parser: argparse.ArgumentParser, leave_out: Iterable[str] = (), helps: Mapping[str, str] | None = None
) -> None:
    """Every setting of a load as a flag. helps: texts of a command instead of those of the fields."""
    parsing.add_flags(parser, BenchConfig, EXAMPLES, COMMON, leave_out, helps)
