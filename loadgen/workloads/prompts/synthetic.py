"""Generated prompts of exact token length. All differ; equal seeds give equal prompts."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.workloads.prompts.installed import GeneratedLoad
from loadgen.workloads.prompts.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Synthetic:
    """An infinite sequence of prompts with lengths drawn from distributions."""

    load: GeneratedLoad

    def __iter__(self) -> Iterator[Prompt]:
        for index in itertools.count():
            yield self.prompt(index)

    def prompt(self, index: int) -> Prompt:
        rng = random.Random(f"lengths:{self.load.seed}:{index}")
        planned_in, planned_out = self.load.lengths.draw(rng)
        input_tokens, output_tokens = self.load.limits.clip(planned_in, planned_out)
        return Prompt(
            prompt_id=f"synthetic-{self.load.seed}-{index}",
            text=self.load.vocabulary.write(input_tokens, f"text:{self.load.text_key}:{index}"),
            planned_input_tokens=planned_in,
            planned_output_tokens=planned_out,
            input_tokens=max(input_tokens, self.load.vocabulary.shortest),
            output_tokens=output_tokens,
        )
