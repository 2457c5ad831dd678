"""`best.toml`: the settings of a study's best configuration, and its provenance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from reports.run_store import replace_file
from tuner.servers.exported_text import render_toml
from tuner.space.configuration import without_unset

BEST_FILE = "best.toml"


def write_best(path: Path, settings: Mapping[str, Any], comments: Sequence[str]) -> None:
    """Write the file atomically. Unset settings are left out."""
    replace_file(path, render_toml(without_unset(settings), {}, comments).encode())


def tuned_by(
    study: str, trial: int, *, is_confirmed: bool, gain: Sequence[float | None] | None, metric: str, load: str
) -> str:
    """The provenance that a tuned server reports: study, trial, gain, and load.

    >>> tuned_by("s", 3, is_confirmed=True, gain=[1.12, 1.08, 1.17], metric="requests_per_s", load="closed, 8 users")
    's/3/confirmed?gain=1.12,1.08,1.17&metric=requests_per_s&load=closed%2C+8+users'
    """
    origin = f"{study}/{trial}" + ("/confirmed" if is_confirmed else "")
    facts: dict[str, str] = {}
    if gain is not None and all(value is not None for value in gain):
        facts = {"gain": ",".join(f"{value:.6g}" for value in gain if value is not None), "metric": metric}
    gained = "".join(f"{name}={quote(value, safe=',')}&" for name, value in facts.items())
    return f"{origin}?{gained}{urlencode({'load': load})}"


def is_confirmed(settings: Mapping[str, Any]) -> bool:
    """Whether the settings of a best file are confirmed, according to their provenance."""
    return str(settings.get("tuned_by", "")).partition("?")[0].endswith("/confirmed")
