"""Green-list watermark: a bias on the half of the vocabulary that the last token picks (arXiv 2301.10226)."""

from dataclasses import dataclass

import torch
from torch import Tensor

_HASH_KEY = 15_485_863


@dataclass(frozen=True, slots=True)
class Watermark:
    """`gamma`: the green share of the vocabulary; `delta`: what is added to a green id's logit."""

    gamma: float = 0.5
    delta: float = 2.0

    def green_ids(self, last_id: int, vocab_size: int, device: torch.device) -> Tensor:
        """The favoured ids after `last_id`, [int(vocab_size * gamma)].

        A permutation made by the device's own generator: CPU and CUDA pick different ids, as in TGI.
        """
        generator = torch.Generator(device=device)
        generator.manual_seed(_HASH_KEY * last_id)
        permutation = torch.randperm(vocab_size, generator=generator, device=device)
        return permutation[: int(vocab_size * self.gamma)]
