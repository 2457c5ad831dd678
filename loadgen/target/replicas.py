"""The further replicas of a target: each must answer, with the same API and model as the first."""

from collections.abc import Sequence

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import TargetError
from loadgen.target.target import Target, TargetFacts


def replicas_of(config: BenchConfig, target: Target) -> list[Target]:
    """The target and its further replicas, in the order of their URLs."""
    return [target, *(Target(url, target.access) for url in config.replicas)]


def check_replicas(config: BenchConfig, replicas: Sequence[Target], facts: TargetFacts) -> None:
    """Raises TargetError for a replica that does not answer, or serves another API, model or kind of server."""
    first, *others = replicas
    for other in others:
        found = other.facts(config.api, config.model, config.engine)
        for name, ours, theirs in (
            ("API", facts.api, found.api),
            ("kind of server", facts.kind.name, found.kind.name),
            ("model", _model(facts), _model(found)),
        ):
            if ours != theirs:
                raise TargetError(
                    f"{other.url}: its {name} is {theirs!r} but that of {first.url} is {ours!r}; replicas must be equal"
                )


def _model(facts: TargetFacts) -> str:
    return str(facts.info.get("model_id") or facts.model)
