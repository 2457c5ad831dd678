"""The Python API: a study as a function call.

Keyword arguments are the flags of `tgi-tune run` with underscores, with the same defaults, checks and exceptions.
Nothing is printed, and no call ends the process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from loadgen.call_words import parse_call, words_of
from loadgen.library import OnLine
from loadgen.progress import progress_to
from tuner.commands.study_flags import add_study_flags, space_errors_of
from tuner.study.artefacts import TRIALS_FILE
from tuner.study.finish_study import FinishedStudy, finish
from tuner.study.open_search import open_search
from tuner.study.prepare_study import prepare
from tuner.study.search_worker import run_search
from tuner.study.study_folder import StudyFolder
from tuner.study.study_plan import plan_of, render_plan


@dataclass(frozen=True, slots=True)
class Study:
    """A finished study: its folder and its verdict."""

    directory: Path
    finished: FinishedStudy

    @property
    def verdict(self) -> dict[str, Any]:
        """The verdict as plain values, as `tgi-tune run --json` prints it."""
        return self.finished.verdict

    @property
    def winner(self) -> dict[str, Any] | None:
        """The settings of the best configuration; None if no configuration meets every limit."""
        settings: dict[str, Any] | None = self.verdict["settings"]
        return settings

    @property
    def trials(self) -> pd.DataFrame:
        """A row for each trial: settings, outcome, metrics."""
        return pd.read_csv(self.directory / TRIALS_FILE)

    @property
    def report(self) -> Path:
        """The path of report.html."""
        return self.finished.report


def tune(
    space: str | Path | Mapping[str, Any] | None = None,
    load: Mapping[str, Any] | None = None,
    *,
    progress: OnLine | None = None,
    **flags: Any,
) -> Study:
    """Search, confirm, write the report; an existing study continues.

    space: a space file or its sections; None searches the settings that the server marks as tunable. load: settings of
    the load, which override those of the space. progress: called with each line of progress. Raises UsageError,
    TunerError.
    """
    file = Path(space) if isinstance(space, str | Path) else None
    sections = None if isinstance(space, str | Path) else space
    args = parse_call(add_study_flags, words_of({**(load or {}), **flags}, () if file is None else (file,)))
    display = progress_to(progress)
    with space_errors_of(file):
        prepared = prepare(args, sections)
        plan = render_plan(plan_of(prepared))
    with StudyFolder(prepared.folder).lock(), open_search(prepared, display) as search:
        display.show(plan)
        return Study(search.folder, finish(search, run_search(search)))
