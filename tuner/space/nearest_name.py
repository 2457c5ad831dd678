"""The known name nearest to a wrong one, for messages."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known.

    >>> nearest_name("paralel", ["batch", "parallel"])
    '; the nearest is `parallel`'
    >>> nearest_name("x", ["batch", "parallel"])
    ''
    """
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; the nearest is `{found[0]}`" if found else ""
