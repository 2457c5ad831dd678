"""Suggests the known name nearest to an unknown one, for messages."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A suggestion for the end of a message about an unknown name; empty if no known name is similar.

    >>> nearest_name("paralel", ["batch", "parallel"])
    '; the nearest is `parallel`'
    >>> nearest_name("x", ["batch", "parallel"])
    ''
    """
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; the nearest is `{found[0]}`" if found else ""
