"""The lengths of answers: forced by the server's extensions or only capped, and the parameters of every request."""

from loadgen.config.bench_config import BenchConfig
from loadgen.dialects.dialect import Sampling, merged
from loadgen.errors import UsageError
from loadgen.target.target import TargetFacts

OPENAI_APIS = ("openai-chat", "openai-completions")
COUNT_EACH_EVENT = {"stream_options": {"continuous_usage_stats": True}}


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
