"""Green-list watermark: a bias on a part of the vocabulary that depends on the last token (arXiv 2301.10226)."""

from dataclasses import dataclass

import torch
from torch import Tensor

_HASH_KEY = 15_485_863


@dataclass(frozen=True, slots=True)
class Watermark:
    """gamma: the green share of the vocabulary. delta: the bias that is added to the logit of a green id."""

    gamma: float = 0.5
    delta: float = 2.0

    def green_ids(self, last_id: int, vocab_size: int, device: torch.device) -> Tensor:
        """The green ids after `last_id`: [int(vocab_size * gamma)].

        The device's own generator permutes the vocabulary: CPU and CUDA choose different ids, as in TGI.
        """
        generator = torch.Generator(device=device)
        generator.manual_seed(_HASH_KEY * last_id)
        permutation = torch.randperm(vocab_size, generator=generator, device=device)
        return permutation[: int(vocab_size * self.gamma)]
