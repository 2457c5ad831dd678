"""A server in virtual time whose drafts and step times are known, for the rule that chooses draft lengths."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.drafting import Drafter
from reference_server.model_server.sequence import Sequence as ModelSequence
from reference_server.model_server.speculation.proposed_draft import NO_PROPOSAL, ProposedDraft
from reference_server.model_server.speculation.step_cost import StepCost
from reference_server.tokenizer import Tokenizer

PROMPT_LEN, NEW_TOKENS = 32, 96


@dataclass(frozen=True)
class KnownText:
    """rates: by level, the chance of a drafted token to be right. shares: of the levels among proposals. coverage: a
    request has a proposal."""

    rates: Sequence[float]
    shares: Sequence[float]
    coverage: float = 1.0


@dataclass
class TextSource:
    """Proposals of one level each. An id of 1 is right: `accepted` counts them. looks: requests so far."""

    text: KnownText
    priors: Sequence[float]
    random: random.Random
    looks: int = 0

    def propose(self, sequences: Sequence[ModelSequence], counts: Sequence[int], /) -> list[ProposedDraft]:
        self.looks += len(sequences)
        return [self._of(count) for count in counts[: len(sequences)]]

    def _of(self, count: int) -> ProposedDraft:
        if not count or self.random.random() >= self.text.coverage:
            return NO_PROPOSAL
        [level] = self.random.choices(range(len(self.text.rates)), self.text.shares)
        return ProposedDraft(
            [int(self.random.random() < self.text.rates[level]) for _ in range(count)], [level] * count
        )


@dataclass
class VirtualServer:
    """Decodes `num_rows` requests together, each replaced by a new one when it has ended.

    step_ns: the true time of a step by its rows, drafted tokens, and requests for which a draft was looked for.
    """

    text: KnownText
    num_rows: int
    step_ns: Callable[[int, int, int], float]
    tokenizer: Tokenizer
    speculate: int = 4
    cost: StepCost | None = None
    priors: Sequence[float] = (0.5,)
    seed: int = 0
    noise: Callable[[random.Random, float], float] = lambda _random, _now_ns: 1.0
    now_ns: float = 0.0
    num_tokens: int = 0
    num_drafted: int = 0
    _rows: list[ModelSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.source = TextSource(self.text, self.priors, random.Random(self.seed + 1))
        self.drafter = Drafter(self.source, self.speculate)
        if self.cost is not None:
            self.drafter.cost = self.cost
        self._rows = [self._request() for _ in range(self.num_rows)]

    def tokens_per_s(self, steps: int) -> float:
        """The speed of the next steps."""
        started_ns, tokens = self.now_ns, self.num_tokens
        for _ in range(steps):
            self.step()
        return 1e9 * (self.num_tokens - tokens) / (self.now_ns - started_ns)

    def step(self) -> None:
        rows = tuple(self._rows)
        looks = self.source.looks
        self.drafter.starts_step(rows, round(self.now_ns), is_plain=False)
        drafts = self.drafter.propose(rows) or ((),) * len(rows)
        drafted = sum(map(len, drafts))
        true_ns = self.step_ns(len(rows), drafted, self.source.looks - looks)
        self.now_ns += true_ns * self.noise(self._random, self.now_ns)
        self.num_drafted += drafted
        for place, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            accepted = next((number for number, id_ in enumerate(draft) if id_ != 1), len(draft))
            for _ in range(1 + accepted):
                row.ids.append(1)
                row.cache_len += 1
                row.stopping.finish_reason(1, "")
            if draft:
                self.drafter.verified(row, accepted, len(draft))
            self.num_tokens += 1 + accepted
            if row.stopping.remaining_tokens <= 0:
                self._rows[place] = self._request()

    def _request(self) -> ModelSequence:
        stopping, ids = StoppingParameters(NEW_TOKENS, ignore_eos_token=True), [1] * (PROMPT_LEN + 1)
        made = ModelSequence(
            request=Request(0, (), PROMPT_LEN, ChooserParameters(), stopping),
            ids=ids,
            prompt_len=PROMPT_LEN,
            cache_len=PROMPT_LEN,
            input_len=1,
            blocks=np.zeros(1, dtype=np.int64),
            stopping=StoppingCriteria(stopping, frozenset()),
            detokenizer=IncrementalDetokenizer(self.tokenizer, ids),
        )
        made.stopping.finish_reason(1, "")
        return made
