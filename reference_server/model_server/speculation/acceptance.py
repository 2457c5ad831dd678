"""How often the drafts of one request are accepted, estimated from its last ones."""

from dataclasses import dataclass

DECAY = 0.85
"""Weight of a token's outcome once the next one is known: the estimate follows the last six or so."""
PRIOR_WEIGHT = 1.0
PRIORS = (0.5, 0.3, 0.3, 0.5, 0.7)
"""By the length of the match, of at most 4 tokens: a longer one is a better guess."""


class AcceptanceRate:
    """The estimated probability that the next token of a draft is accepted, if those before it are."""

    __slots__ = ("_accepted", "_tried")

    def __init__(self, prior: float) -> None:
        self._accepted, self._tried = prior * PRIOR_WEIGHT, PRIOR_WEIGHT

    @property
    def value(self) -> float:
        return self._accepted / self._tried

    def add(self, num_accepted: int, num_verified: int) -> None:
        """Count a verified draft: its accepted tokens, and the first refused one if there is one."""
        for place in range(min(num_accepted + 1, num_verified)):
            self._accepted = self._accepted * DECAY + (place < num_accepted)
            self._tried = self._tried * DECAY + 1


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft's first token, compared with the request's next one without a row in a step.

    position: its index in the request's ids.
    """

    position: int
    token_id: int
    match_len: int


class DraftHistory:
    """The estimates of one request, by the length of the match that a draft follows."""

    __slots__ = ("_guess", "_rates", "match_len")

    def __init__(self) -> None:
        self._rates = [AcceptanceRate(prior) for prior in PRIORS]
        self._guess: Guess | None = None
        self.match_len = 0
        """Of the draft in the step in progress."""

    def rate(self, match_len: int) -> float:
        return self._rates[match_len].value

    def verified(self, num_accepted: int, num_verified: int) -> None:
        """Count the draft of a step."""
        self._rates[self.match_len].add(num_accepted, num_verified)

    def guess(self, ids: list[int], token_id: int, match_len: int) -> None:
        """Compare the next token of `ids` with `token_id` once it is known."""
        self._guess = Guess(len(ids), token_id, match_len)

    def settle(self, ids: list[int]) -> None:
        """Count the guess whose token is known by now."""
        guess = self._guess
        if guess is not None and len(ids) > guess.position:
            self._rates[guess.match_len].add(int(ids[guess.position] == guess.token_id), 1)
            self._guess = None
