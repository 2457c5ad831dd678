"""A model in a hub cache, without a hub."""

from collections.abc import Mapping
from pathlib import Path

COMMIT = "0" * 40


def write_cached_model(cache: Path, model_id: str, files: Mapping[str, str]) -> Path:
    """Write `files` as the `main` branch of a model; returns the snapshot's directory."""
    repository = cache / f"models--{model_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name, text in files.items():
        (snapshot / name).write_text(text)
    return snapshot
