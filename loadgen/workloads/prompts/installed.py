"""Workloads of installed packages: prompts that an entry point generates."""

from collections.abc import Iterable
from dataclasses import dataclass

from loadgen.entry_points import Names
from loadgen.workloads.lengths import PairedLengths
from loadgen.workloads.prompts.prompt import Prompt, ServerLimits
from loadgen.workloads.prompts.vocabulary import Vocabulary

SHIPPED = ("synthetic", "shared_prefix", "multi_turn", "prompts", "sharegpt", "azure_llm", "burstgpt", "mooncake")
WORKLOAD_NAMES = Names("tgi_bench.workloads", SHIPPED)


@dataclass(frozen=True, slots=True)
class GeneratedLoad:
    """The settings that a workload generates its prompts from.

    Lengths may depend on `seed` alone; texts also depend on `text_key`, which is new for every run. `is_cold`: no two
    prompts may begin with the same words.
    """

    vocabulary: Vocabulary
    lengths: PairedLengths
    limits: ServerLimits
    seed: int
    text_key: str
    is_cold: bool


def installed_prompts(name: str, load: GeneratedLoad) -> Iterable[Prompt]:
    """The prompts of an installed workload, readable more than once. Raises UsageError."""
    prompts = WORKLOAD_NAMES.call(name, load)
    if not isinstance(prompts, Iterable) or iter(prompts) is prompts:
        raise WORKLOAD_NAMES.broken(name, "it must return an object that can be iterated more than once")
    try:
        first, again = next(iter(prompts), None), next(iter(prompts), None)
    except Exception as error:
        raise WORKLOAD_NAMES.broken(name, f"{type(error).__name__}: {error}") from error
    if not isinstance(first, Prompt):
        raise WORKLOAD_NAMES.broken(
            name, f"its first prompt is {first!r}, not a loadgen.workloads.prompts.prompt.Prompt"
        )
    if first != again:
        raise WORKLOAD_NAMES.broken(
            name, "its prompts differ from one iteration to the next; use `seed` and `text_key`"
        )
    return prompts
