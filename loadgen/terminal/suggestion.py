"""The name that was probably meant: "did you mean" for flags, values, keys and commands."""

import difflib
from collections.abc import Iterable

LEAST_LIKENESS = 0.6


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message: the known word that this one extends or is most like; empty if none is like it.

    >>> nearest("poison", ["closed", "poisson"])
    "; did you mean 'poisson'?"
    >>> nearest("x", ["closed", "poisson"])
    ''
    >>> nearest("--web-port", ["--export", "--web"])
    "; did you mean '--web'?"
    """
    known = list(known)
    begun = max((each for each in known if len(each) > 2 and word.startswith(f"{each}-")), key=len, default=None)
    close = begun or nearest_word(word, known)
    return f"; did you mean {close!r}?" if close else ""


def nearest_word(word: str, known: Iterable[str], likeness: float = LEAST_LIKENESS) -> str | None:
    """The known word that is most like this one, if one is."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)), None)
