"""How often the drafts of one request are accepted, estimated from its last ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from reference_server.model_server.speculation.look_value import LookValue

DECAY = 0.85
"""Weight of a token's outcome once the next one is known: the estimate follows the last six or so."""
OVERALL_DECAY = 0.98
"""The same for all requests together; their rates are the initial rates of a new request."""
SHORTEST_LONGEST_PAUSE = 8
"""Longest pause of a request between two looks for drafts, in tokens, if a look costs nothing."""
PRIOR_WEIGHT = 1.0


class AcceptanceRate:
    """The estimated probability that the next token of a draft is accepted, if those before it are."""

    __slots__ = ("_accepted", "_decay", "_tried")

    def __init__(self, prior: float, decay: float = DECAY) -> None:
        self._accepted, self._tried, self._decay = prior * PRIOR_WEIGHT, PRIOR_WEIGHT, decay

    @property
    def value(self) -> float:
        return self._accepted / self._tried

    def add(self, is_accepted: bool) -> None:
        """Count one token, verified after accepted ones only."""
        self._accepted = self._accepted * self._decay + is_accepted
        self._tried = self._tried * self._decay + 1


def overall_rates(priors: Sequence[float]) -> list[AcceptanceRate]:
    """The rates of all requests together, by the level of a token; before any, `priors`."""
    return [AcceptanceRate(prior, OVERALL_DECAY) for prior in priors]


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

    overall: the rates of all requests; they are the initial rates of this request, and it updates them. look_value:
    the mean value of their looks. While looks for this request have saved time in the mean, every token has one. After
    any other look without a draft worth its cost, the pause of the request is twice as many tokens as the last one; a
    correct guess ends it.
    """

    __slots__ = ("_guess", "_levels", "_look_value", "_overall", "_pause", "_rates", "look_at")

    def __init__(self, overall: Sequence[AcceptanceRate], look_value: float = 0.0) -> None:
        self._overall = overall
        self._look_value = LookValue(look_value)
        self._rates = [AcceptanceRate(each.value) for each in overall]
        self._guess: Guess | None = None
        self._pause = 1
        self._levels: Sequence[int] = ()
        self.look_at = 0
        """The number of ids from which a draft is looked for again."""

    @property
    def saves_time(self) -> bool:
        """Whether its looks saved time in the mean."""
        return self._look_value.mean > 0

    def rate(self, level: int) -> float:
        return self._rates[level].value

    def drafted(self, levels: Sequence[int]) -> None:
        """A draft with tokens of these levels is being verified."""
        self._levels = levels

    def verified(self, num_accepted: int, num_verified: int) -> None:
        """Count the draft of a step: its accepted tokens, and the first refused one if there is one."""
        for place in range(min(num_accepted + 1, num_verified)):
            self._add(self._levels[place], place < num_accepted)

    def looked(self, value: float, num_ids: int, longest: int = SHORTEST_LONGEST_PAUSE) -> bool:
        """Count a look of this value after `num_ids` ids; returns whether the next token has a look again."""
        self._look_value.add(value)
        if value > 0 or self._look_value.mean > 0:
            self._pause = 1
            return True
        self._skip(num_ids, longest)
        return False

    def measured(self, value: float, num_ids: int, longest: int) -> bool:
        """The same for a run of looks, of which the time was measured."""
        self._look_value.add(value)
        if self.saves_time:
            self._pause = 1
            return True
        self._skip(num_ids, longest)
        return False

    def _skip(self, num_ids: int, longest: int) -> None:
        self.look_at = num_ids + min(self._pause, longest)
        self._pause = min(2 * self._pause, longest)

    def guess(self, num_ids: int, token_id: int, level: int) -> None:
        """Compare the token after `num_ids` ids with `token_id` once it is known."""
        self._guess = Guess(num_ids, token_id, level)

    def settle(self, ids: Sequence[int]) -> bool:
        """Count a guess whose token is now known; returns whether it was correct."""
        guess = self._guess
        if guess is None or len(ids) <= guess.position:
            return False
        is_right = ids[guess.position] == guess.token_id
        self._add(guess.level, is_right)
        self._guess = None
        if is_right:
            self._pause = 1
        return is_right

    def _add(self, level: int, is_accepted: bool) -> None:
        self._rates[level].add(is_accepted)
        self._overall[level].add(is_accepted)
