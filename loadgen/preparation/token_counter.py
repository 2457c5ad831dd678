"""Counts tokens as the server does: by a tokenizer file, the server's route, or the usage of its responses."""

from dataclasses import dataclass

from loadgen.config.bench_config import BenchConfig
from loadgen.dialects.dialect import ParsedAnswer
from loadgen.dialects.registry import open_dialect
from loadgen.errors import TargetError
from loadgen.preparation.length_control import probe_sampling
from loadgen.target.control import ControlClient
from loadgen.target.target import TargetFacts
from loadgen.workloads.prompts.prompt import Prompt
from loadgen.workloads.prompts.tokenizer_file import TokenizerFile
from loadgen.workloads.prompts.vocabulary import CountTokens


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts tokens, including special ones. `digest` is that of a tokenizer file.

    `is_costly`: each count is a request that the server answers, so few texts are counted, and no text of the run.
    """

    count: CountTokens
    source: str
    digest: str | None = None
    is_costly: bool = False


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
