"""The mean value of a look, a search for drafts: the plain tokens that it is expected to save, less its own cost."""

DECAY = 0.9
"""Weight of a look's value once the next one is known: the mean of one request follows the last ten."""
OVERALL_DECAY = 0.98
"""The same for all requests together; their mean is the initial one of a new request."""
PRIOR_WEIGHT = 1.0


class LookValue:
    """A decayed mean. The outcome of one look says little about the next one, but their mean does."""

    __slots__ = ("_decay", "_sum", "_weight")

    def __init__(self, prior: float = 0.0, decay: float = DECAY) -> None:
        self._sum, self._weight, self._decay = prior * PRIOR_WEIGHT, PRIOR_WEIGHT, decay

    @property
    def mean(self) -> float:
        """Above 0 if looks save time."""
        return self._sum / self._weight

    def add(self, value: float) -> None:
        """Count one look."""
        self._sum = self._sum * self._decay + value
        self._weight = self._weight * self._decay + 1
