"""Generated prompts of exact token length. All differ; equal seeds give equal prompts."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.workloads.lengths import PairedLengths
from loadgen.workloads.prompts.prompt import Prompt, ServerLimits
from loadgen.workloads.prompts.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Synthetic:
    """An infinite sequence of prompts with lengths drawn from distributions."""

    vocabulary: Vocabulary
    lengths: PairedLengths
    limits: ServerLimits
    seed: int
    text_key: str

    def __iter__(self) -> Iterator[Prompt]:
        for index in itertools.count():
            yield self.prompt(index)

    def prompt(self, index: int) -> Prompt:
        rng = random.Random(f"lengths:{self.seed}:{index}")
        planned_in, planned_out = self.lengths.draw(rng)
        input_tokens, output_tokens = self.limits.clip(planned_in, planned_out)
        return Prompt(
            prompt_id=f"synthetic-{self.seed}-{index}",
            text=self.vocabulary.write(input_tokens, f"text:{self.text_key}:{index}"),
            planned_input_tokens=planned_in,
            planned_output_tokens=planned_out,
            input_tokens=max(input_tokens, self.vocabulary.shortest),
            output_tokens=output_tokens,
        )
