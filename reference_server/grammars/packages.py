"""Which packages grammars need. Imports none of them, nor anything else that a bare machine lacks."""

import importlib.util

NEEDED_PACKAGES = ("llguidance", "outlines_core", "jsonschema_rs")


def missing_packages() -> list[str]:
    """What the `grammar` extra would bring and is not installed."""
    return [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
