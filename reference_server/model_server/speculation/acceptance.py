"""How often the drafts of one request are accepted, estimated from its last ones."""

from collections.abc import Sequence
from dataclasses import dataclass

DECAY = 0.85
"""Weight of a token's outcome once the next one is known: the estimate follows the last six or so."""
OVERALL_DECAY = 0.98
"""The same of all requests together, where a new request starts."""
SHORTEST_LONGEST_PAUSE = 8
"""Tokens after which a request without drafts is looked at again, at most, if a look costs nothing."""
PRIOR_WEIGHT = 1.0


class DecayedMean:
    """The mean of values, in which each counts less once newer ones are known."""

    __slots__ = ("_decay", "_sum", "_weight")

    def __init__(self, prior: float, decay: float = DECAY) -> None:
        self._sum, self._weight, self._decay = prior * PRIOR_WEIGHT, PRIOR_WEIGHT, decay

    @property
    def value(self) -> float:
        return self._sum / self._weight

    def add(self, value: float) -> None:
        self._sum = self._sum * self._decay + value
        self._weight = self._weight * self._decay + 1


class DraftEstimates:
    """What is expected of drafts.

    rates: by the level of a token, the probability that it is accepted if those before it are. worth: the time in ns
    that a look for a draft saves; the looks that find none and the steps that refuse one count too.
    """

    __slots__ = ("rates", "worth")

    def __init__(self, priors: Sequence[float], worth: float = 0.0, decay: float = DECAY) -> None:
        self.rates = [DecayedMean(prior, decay) for prior in priors]
        self.worth = DecayedMean(worth, decay)

    @classmethod
    def overall(cls, priors: Sequence[float]) -> "DraftEstimates":
        """Those of all requests together; before any, `priors`."""
        return cls(priors, decay=OVERALL_DECAY)

    def of_one(self) -> "DraftEstimates":
        """Those of a new request."""
        return DraftEstimates([rate.value for rate in self.rates], self.worth.value)


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft's first token, compared with the request's next one without a row in a step.

    position: its index in the request's ids.
    """

    position: int
    token_id: int
    level: int


class DraftHistory:
    """The estimates of one request, by the level of a token; and when to draft for it again.

    overall: those of all requests, which this one starts from and adds to. A request whose looks are not worth their
    time is left alone for twice as many tokens as the last time; a right guess ends the pause.
    """

    __slots__ = ("_guess", "_levels", "_overall", "_own", "_pause", "look_at")

    def __init__(self, overall: DraftEstimates) -> None:
        self._overall = overall
        self._own = overall.of_one()
        self._guess: Guess | None = None
        self._pause = 1
        self._levels: Sequence[int] = ()
        self.look_at = 0
        """The number of ids from which on a draft is looked for."""

    def rate(self, level: int) -> float:
        return self._own.rates[level].value

    def looked(self, saved_ns: float) -> None:
        """Count a look for a draft, which is expected to save so much time."""
        self._own.worth.add(saved_ns)
        self._overall.worth.add(saved_ns)

    def drafted(self, levels: Sequence[int]) -> None:
        """A draft with tokens of these levels is being verified."""
        self._levels = levels
        self._pause = 1

    def verified(self, num_accepted: int, num_verified: int) -> None:
        """Count the draft of a step: its accepted tokens, and the first refused one if there is one."""
        for place in range(min(num_accepted + 1, num_verified)):
            self._add(self._levels[place], place < num_accepted)

    def pause(self, num_ids: int, longest: int = SHORTEST_LONGEST_PAUSE) -> None:
        """Look for no draft for some tokens, unless looks are worth their time."""
        if self._own.worth.value > 0:
            self._pause = 1
            return
        self.look_at = num_ids + min(self._pause, longest)
        self._pause = min(2 * self._pause, longest)

    def guess(self, num_ids: int, token_id: int, level: int) -> None:
        """Compare the token after `num_ids` ids with `token_id` once it is known."""
        self._guess = Guess(num_ids, token_id, level)

    def settle(self, ids: Sequence[int]) -> None:
        """Count the guess whose token is known by now."""
        guess = self._guess
        if guess is not None and len(ids) > guess.position:
            is_right = ids[guess.position] == guess.token_id
            self._add(guess.level, is_right)
            self._guess = None
            if is_right:
                self._pause = 1

    def _add(self, level: int, is_accepted: bool) -> None:
        self._own.rates[level].add(is_accepted)
        self._overall.rates[level].add(is_accepted)
