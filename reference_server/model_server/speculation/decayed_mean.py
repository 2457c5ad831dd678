"""A mean in which older outcomes count less: of accepted tokens, and of the values of looks."""


class DecayedMean:
    """prior: the mean before the first outcome; it counts as one outcome. decay: the factor on the weight of older
    outcomes at each new one, so that the mean follows about the last 1 / (1 - decay) outcomes."""

    __slots__ = ("_decay", "_sum", "_weight")

    def __init__(self, prior: float, decay: float) -> None:
        self._sum, self._weight, self._decay = prior, 1.0, decay

    @property
    def value(self) -> float:
        return self._sum / self._weight

    def add(self, outcome: float) -> None:
        self._sum = self._sum * self._decay + outcome
        self._weight = self._weight * self._decay + 1
