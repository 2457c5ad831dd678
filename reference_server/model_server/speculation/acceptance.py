"""Estimates the acceptance of the drafts of one request from its last drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

from reference_server.model_server.speculation.decayed_mean import DecayedMean

DECAY = 0.85
"""Decay of the acceptance of one request: the estimate follows about the last six tokens."""
LOOK_DECAY = 0.9
"""Decay of the value of its looks: one look does not predict the next look, but the mean of ten looks does."""
OVERALL_DECAY = 0.98
"""Decay of both for all requests together. A new request starts with these means."""
PAUSE_OF_FREE_LOOKS = 8
"""Longest pause of a request between two looks for drafts, in tokens, if a look costs nothing."""


def overall_rates(priors: Sequence[float]) -> list[DecayedMean]:
    """The acceptance of all requests together, by the level of a token. The initial values are `priors`."""
    return [DecayedMean(prior, OVERALL_DECAY) for prior in priors]


@dataclass(frozen=True, slots=True)
class Guess:
    """The first token of a draft that is not verified: it is compared with the request's next token instead.

    position: its index in the request's ids.
    """

    position: int
    token_id: int
    level: int


class DraftHistory:
    """The estimates of one request, by the level of a token, and the time of its next look for drafts.

    A rate is the probability that a token is accepted if all tokens before it are. overall: the rates of all requests;
    they are the initial rates of this request, and it updates them. A look is a search for drafts. Its value is the
    number of plain tokens that it is expected to save, less its own cost. look_value: the mean value of all looks.

    If the looks of this request save time on average, every token has a look. Otherwise, a look without a draft that
    saves time starts a pause of twice as many tokens as the previous pause. A correct guess ends the pause.
    """

    __slots__ = ("_guess", "_levels", "_look_value", "_overall", "_pause", "_rates", "look_at")

    def __init__(self, overall: Sequence[DecayedMean], look_value: float = 0.0) -> None:
        self._overall = overall
        self._look_value = DecayedMean(look_value, LOOK_DECAY)
        self._rates = [DecayedMean(each.value, DECAY) for each in overall]
        self._guess: Guess | None = None
        self._pause = 1
        self._levels: Sequence[int] = ()
        self.look_at = 0
        """The number of ids at which the next look is due."""

    @property
    def saves_time(self) -> bool:
        """Whether its looks saved time on average."""
        return self._look_value.value > 0

    def rate(self, level: int) -> float:
        return self._rates[level].value

    def drafted(self, levels: Sequence[int]) -> None:
        """A draft with tokens of these levels is being verified."""
        self._levels = levels

    def verified(self, num_accepted: int, num_verified: int) -> None:
        """Count the draft of a step: its accepted tokens, and the first refused token if there is one."""
        for place in range(min(num_accepted + 1, num_verified)):
            self._add(self._levels[place], place < num_accepted)

    def looked(self, value: float, num_ids: int, longest: int = PAUSE_OF_FREE_LOOKS) -> bool:
        """Count a look of this value after `num_ids` ids; returns whether the next token has a look too."""
        self._look_value.add(value)
        return self._looks_again(value > 0 or self.saves_time, num_ids, longest)

    def measured(self, value: float, num_ids: int, longest: int) -> bool:
        """The same for a run of looks whose time was measured."""
        self._look_value.add(value)
        return self._looks_again(self.saves_time, num_ids, longest)

    def _looks_again(self, is_due: bool, num_ids: int, longest: int) -> bool:
        """Start a pause unless a look is due for the next token."""
        if is_due:
            self._pause = 1
            return True
        self.look_at = num_ids + min(self._pause, longest)
        self._pause = min(2 * self._pause, longest)
        return False

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
