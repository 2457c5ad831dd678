"""Groups of prompts with a shared prefix, as with one system prompt."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.workloads.prompts.installed import GeneratedLoad
from loadgen.workloads.prompts.prompt import Prompt, marker


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """An infinite sequence of prompts: a prefix that a group shares, then a unique part.

    Groups are drawn with equal weights, or by Zipf's law (1, 1/2, 1/3, …). The lengths of `load` are those of the
    unique part and the answer.
    """

    load: GeneratedLoad
    num_groups: int
    prefix_tokens: int
    is_zipf: bool

    def __iter__(self) -> Iterator[Prompt]:
        for index in itertools.count():
            yield self.prompt(index)

    def prompt(self, index: int) -> Prompt:
        rng = random.Random(f"lengths:{self.load.seed}:{index}")
        group = rng.choices(range(self.num_groups), self._weights())[0]
        own_tokens, planned_out = self.load.lengths.draw(rng)
        planned_in = self.prefix_tokens + own_tokens
        input_tokens, output_tokens = self.load.limits.clip(planned_in, planned_out)
        input_tokens = max(input_tokens, self.load.vocabulary.shortest)
        shared = (*marker(self.load.is_cold, f"{self.load.text_key}:{index}"), (self.prefix_tokens, self._key(group)))
        parts = [*shared, (planned_in, f"text:{self.load.text_key}:{index}")]
        return Prompt(
            prompt_id=f"shared_prefix-{self.load.seed}-{index}",
            text="".join(self.load.vocabulary.compose(parts, input_tokens)),
            planned_input_tokens=planned_in,
            planned_output_tokens=planned_out,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            parts=shared,
        )

    def prefixes(self) -> list[Prompt]:
        """Every shared prefix alone, with an answer of one token; sending them warms the cache."""
        size, _ = self.load.limits.clip(self.prefix_tokens, 1)
        return [
            Prompt(
                prompt_id=f"prefix-{self.load.seed}-{group}",
                text="".join(self.load.vocabulary.compose([(self.prefix_tokens, self._key(group))], size)),
                output_tokens=1,
                parts=((self.prefix_tokens, self._key(group)),),
            )
            for group in range(self.num_groups)
        ]

    def _key(self, group: int) -> str:
        return f"prefix:{self.load.text_key}:{group}"

    def _weights(self) -> list[float]:
        return [1 / (rank + 1) if self.is_zipf else 1.0 for rank in range(self.num_groups)]
