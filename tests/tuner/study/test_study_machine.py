"""A study under interruptions (reliability I18, T71): workers stop or are killed while writing, and others continue."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tuner.config import ParamSection
from tuner.space.search_space import SearchSpace
from tuner.study.optuna_study import LEASE, MAX_REDONE, OptunaStudy
from tuner.study.shared_storage.storage import JOURNAL_FILE
from tuner.trial.outcome import TrialResult

SPACE = SearchSpace.of({"a": ParamSection(type="int", low=1, high=8)}, [], frozenset({"a"}))
DEAD = {"host": "another-host", "pid": 1, "started": "1", "at": 0.0}
"""The lease of a worker that has not renewed it for years."""


class StudyMachine(RuleBasedStateMachine):
    """A study in a journal, and the results that were reported to it."""

    trials = Bundle("trials")

    @initialize()
    def start(self):
        self.folder = Path(tempfile.mkdtemp())
        self.told, self.running, self.lost, self.num_torn = {}, {}, set(), 0
        self.repeats_left = {}
        self.open()

    def open(self):
        self.study = OptunaStudy(self.folder, seed=0, sampler="random")

    def teardown(self):
        shutil.rmtree(self.folder)

    @rule(target=trials)
    def ask(self):
        trial = self.study.ask()
        self.running[trial.number] = SPACE.suggest(trial, {})
        return trial.number, trial

    @rule(taken=consumes(trials), value=st.sampled_from([None, 3.5]), is_failed=st.booleans())
    def tell(self, taken, value, is_failed):
        number, trial = taken
        if number not in self.running or number in self.lost:
            return
        outcome = "failed" if is_failed else "infeasible" if value is None else "measured"
        chosen = self.running.pop(number)
        self.study.tell(trial, TrialResult(number, chosen, outcome, value=None if is_failed else value))
        self.told[number] = outcome

    @rule(taken=trials)
    def lose_the_worker(self, taken):
        number, trial = taken
        if number in self.running:
            self.study.note(trial, LEASE, DEAD)
            self.lost.add(number)

    @rule()
    def repeat_lost_trials(self):
        found = self.study.lost()
        assert {trial.number for trial in found} == self.lost
        for trial in found:
            times = int(trial.user_attrs.get("redone", 0))
            assert self.study.redo(trial) == (times < MAX_REDONE)
            del self.running[trial.number]
        self.lost.clear()

    @rule(taken=consumes(trials))
    def give_back(self, taken):
        number, trial = taken
        if number in self.running and number not in self.lost:
            self.study.give_back(trial)
            del self.running[number]

    @rule()
    def enqueue(self):
        self.study.enqueue(SPACE, {"a": 5})

    @rule()
    def continue_from_the_files(self):
        self.open()

    @precondition(lambda self: self.num_torn < 3)
    @rule(share=st.floats(0.1, 0.9))
    def tear_the_last_line(self, share):
        """A worker is killed while it writes a line; the next process continues."""
        journal = self.folder / JOURNAL_FILE
        line = journal.read_bytes().splitlines()[-1]
        with journal.open("ab") as file:
            file.write(line[: max(1, int(len(line) * share))])
        self.num_torn += 1
        self.open()

    @invariant()
    def each_reported_trial_has_one_result(self):
        assert {each.number: each.outcome for each in self.study.results()} == self.told
        assert len(self.study.results()) == len(self.told)

    @invariant()
    def the_other_trials_run_or_wait(self):
        assert self.study.num_running == len(self.running)
        torn = self.folder / f"{JOURNAL_FILE}.torn"
        assert self.num_torn == (len(torn.read_bytes().splitlines()) if torn.exists() else 0)
        for line in (self.folder / JOURNAL_FILE).read_bytes().splitlines():
            json.loads(line)


class LongStudyMachine(StudyMachine):
    """The same, more often."""


StudyMachine.TestCase.settings = settings(max_examples=5, stateful_step_count=30, deadline=None, derandomize=True)
LongStudyMachine.TestCase.settings = settings(StudyMachine.TestCase.settings, max_examples=60, stateful_step_count=50)
test_no_interruption_loses_or_repeats_a_result = StudyMachine.TestCase
test_no_interruption_loses_or_repeats_a_result_at_length = pytest.mark.slow(LongStudyMachine.TestCase)
