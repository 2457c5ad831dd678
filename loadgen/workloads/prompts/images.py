"""Images of a load: how many each request has, new for each or shared by some requests."""

import random
from dataclasses import dataclass

from loadgen.workloads.prompts.prompt import Prompt
from loadgen.workloads.prompts.synthetic_image import SyntheticImage

SHARED_IMAGES = 4
"""Different images that requests with shared images draw from."""


@dataclass(frozen=True, slots=True)
class ImageMix:
    """`count` images of width and height for every request; each is a shared one with probability `shared`."""

    count: int
    width: int
    height: int
    shared: float = 0.0
    seed: str = "0"

    def of(self, prompt: Prompt) -> tuple[SyntheticImage, ...]:
        """The images of a prompt. Equal for equal seeds."""
        rng = random.Random(f"images:{self.seed}:{prompt.prompt_id}")
        keys = [
            f"shared:{rng.randrange(SHARED_IMAGES)}" if rng.random() < self.shared else f"{prompt.prompt_id}:{number}"
            for number in range(self.count)
        ]
        return tuple(SyntheticImage(f"{self.seed}:{key}", self.width, self.height) for key in keys)
