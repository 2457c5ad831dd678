"""Joining a study from elsewhere: what it searches is in its storage, beside its trials."""

from pathlib import Path

from loadgen import settings
from tuner.config import TuneConfig
from tuner.errors import StudyError
from tuner.prepare import Prepared, load_of, stored
from tuner.study_folder import STUDY_FILE, StudyFolder


def joined(name: str | None, storage: str | None, studies: Path) -> Prepared:
    """The study to work on: from its folder where that is here, else from its storage.

    Raises StudyError where there is none, or this machine's results would not be comparable.
    """
    if storage is None:
        return stored(name, studies)
    from tuner.study import stored_study

    found, content = stored_study(storage, name, studies)
    folder = studies / found
    config = settings.load(TuneConfig, content["config"])
    here = StudyFolder(folder)
    if not here.identity():
        here.update(STUDY_FILE, {"identity": content["identity"], "config": content["config"]})
    section = config.study.model_copy(update={"storage": storage, "name": found})
    config = config.model_copy(update={"study": section})
    return Prepared(config, load_of(config), folder)


def check_comparable(config: TuneConfig, mine: dict[str, str], theirs: dict[str, str]) -> None:
    """Raises StudyError naming what makes this worker's results another kind than the study's, unless it is mixed."""
    names = {"device": "device class", "build": "server build", "load": "load"}
    differing = [
        f"{text} {mine[key]!r}, not {theirs[key]!r}" for key, text in names.items() if mine[key] != theirs[key]
    ]
    if differing and not config.study.mixed:
        raise StudyError(f"this worker has {'; '.join(differing)}: `mixed = true` lets it join all the same")
