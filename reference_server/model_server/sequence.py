"""One request's mutable decoding state on this shard, without K/V."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reference_server.images.chunks import Span
from reference_server.messages import Request
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.grammar import GrammarState
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.prompt_images import GridPositions, PromptImages
from reference_server.model_server.speculation.acceptance import DraftHistory
from reference_server.model_server.speculation.hidden_states import HiddenRow
from reference_server.model_server.speculation.ngram import FirstMatch, SuffixIndex


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while it is in a batch.

    ids: the prompt after truncation, then the generated ids. cache_len: leading tokens whose K/V exist. input_len:
    tokens that the next forward computes. blocks: pages in order of token position. prompt_logprobs: one per prompt
    token computed so far, if requested. stopped: it has ended and the router has not filtered it out yet. unread:
    tokens that were chosen and are not in `ids` yet; the next forward adds their K/V.

    With an encoder the prompt is `encoder_ids`, and `ids` begins with the decoder's start token. state: of a recurrent
    forward. grammar: the state of the output in its grammar.
    images: those of the prompt, until its K/V exist. grid: rotary positions; None if they are places in the sequence.
    bidirectional: [2, prompt tokens], first and end of the tokens that each token attends to in both directions, until
    the K/V exist; None if all tokens are causal. uncut_spans: images within which no chunk of the prompt ends.
    ngrams, draft_history: where the ids occur before, and how often drafts were accepted; once drafts need them.
    hidden: from which draft heads guess the tokens after the newest one.
    adapter: the slot of its adapter; 0 is the base model.

        ids     |---- prompt ----|-- generated --|- unread -|
        cache   |---- cache_len ---------------|- input_len -|
    """

    request: Request
    ids: list[int]
    prompt_len: int
    cache_len: int
    input_len: int
    blocks: NDArray[np.int64]
    stopping: StoppingCriteria
    detokenizer: IncrementalDetokenizer
    prompt_logprobs: list[float] = field(default_factory=list)
    stopped: bool = False
    unread: int = 0
    encoder_ids: list[int] = field(default_factory=list)
    state: object = None
    grammar: GrammarState | None = None
    images: PromptImages | None = None
    bidirectional: NDArray[np.int64] | None = None
    uncut_spans: tuple[Span, ...] = ()
    grid: GridPositions | None = None
    ngrams: FirstMatch | SuffixIndex | None = None
    draft_history: DraftHistory | None = None
    hidden: HiddenRow | None = None
    adapter: int = 0

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def is_prefill(self) -> bool:
        """Whether the K/V of prompt tokens are missing."""
        return self.cache_len < self.prompt_len

    @property
    def is_sampled(self) -> bool:
        """Whether the next forward computes the last known token, so that the token after it is chosen."""
        return self.cache_len + self.input_len == self.known_len

    @property
    def known_len(self) -> int:
        """The tokens so far, with those that were chosen and are not read."""
        return len(self.ids) + self.unread

    @property
    def generated_ids(self) -> list[int]:
        return self.ids[self.prompt_len :]
