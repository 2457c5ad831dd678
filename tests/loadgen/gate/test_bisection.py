import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen import cli
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import MeasurementError, UsageError
from loadgen.gate.bisection import BisectionRuns, Bisector, Question, check_server, relative_change
from loadgen.progress import SilentProgress
from loadgen.target.launched.revision import Revision, check_out, remove_check_out
from reports.gate.change_point import Bisection, BisectionOutcome, Conclusion
from reports.gate.side_run import SideRun

METRIC = "tpot_p50_ms"
SERVER = f"{sys.executable} {{tree}}/server.py"
SOURCE = """
import os
from http.server import ThreadingHTTPServer
from tests.support.servers.stream_server import Handler, Script, ServerState

state = ServerState(script=lambda body: Script(first_s=0.005, gap_s=GAP_S))
server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), type("Server", (Handler,), {"state": state}))
server.daemon_threads = True
server.serve_forever()
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Six commits of a server; the fourth makes its tokens 60 % slower. The working directory is in it."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    for number in range(6):
        gap_s = 0.005 if number < 3 else 0.008
        (root / "server.py").write_text(f"# {number}\n" + SOURCE.replace("GAP_S", str(gap_s)))
        git(root, "add", "server.py")
        git(root, "-c", "user.name=t", "-c", "user.email=t@t.example", "commit", "--quiet", "-m", f"change {number}")
    monkeypatch.chdir(root)
    return root


def git(root, *words):
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


class PlantedChange:
    """Measures without a server: the metric of every revision, from the planted one on 10 % higher."""

    def __init__(self, commits, first_changed, invalid=(), status="invalid"):
        self.slow = set(commits[first_changed:])
        self.invalid, self.status = set(invalid), status
        self.measured = []

    def __call__(self, side, directory):
        self.measured.append(directory.name)
        factor = 1.1 if side.identity["commit"] in self.slow else 1.0
        wobble = 1 + 0.001 * (len(self.measured) % 3)
        status = self.status if directory.name in self.invalid else "valid"
        return SideRun(side.label, {METRIC: 10 * factor * wobble}, status, ("too few",) if self.invalid else ())


def bisection(repository, tmp_path, first_changed=3, invalid=(), status="invalid"):
    question = Question.of("HEAD~5", "HEAD", METRIC, BenchConfig(), SERVER)
    runs = PlantedChange(question.commits, first_changed, invalid, status)
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    return Bisector(out, BenchConfig(), Bisection(6), SilentProgress()), BisectionRuns.open(out, question), runs


def test_the_planted_commit_is_found_and_every_run_is_stored(repository, tmp_path):
    bisector, state, measure = bisection(repository, tmp_path)

    conclusion = bisector.run(state, measure)

    assert (conclusion.outcome, conclusion.first_changed) == (BisectionOutcome.FOUND, 3)
    assert relative_change(state, 3) == pytest.approx(0.1, abs=0.003)
    assert len(json.loads((tmp_path / "out" / "bisect.json").read_text())["runs"]) == len(measure.measured)
    assert "source" not in git(repository, "worktree", "list")


def test_an_interrupted_bisection_continues_with_the_runs_it_has(repository, tmp_path):
    bisector, state, measure = bisection(repository, tmp_path)

    class Stopped(Exception):
        pass

    def until_the_fifth(side, directory):
        if len(measure.measured) == 5:
            raise Stopped
        return measure(side, directory)

    with pytest.raises(Stopped):
        bisector.run(state, until_the_fifth)
    again = BisectionRuns.open(tmp_path / "out", state.question)

    kept = {path.name: (path / "checked-out").stat().st_mtime_ns for path in (tmp_path / "out").glob("source-*")}
    assert len(again.runs) == 5
    assert kept

    found = []

    def until_found(side, directory):
        found.append(
            {path.name: (path / "checked-out").stat().st_mtime_ns for path in directory.parent.glob("source-*")}
        )
        return measure(side, directory)

    assert isinstance(bisector.run(again, until_found), Conclusion)
    assert measure.measured[5].startswith("run06-")
    assert kept.items() <= found[-1].items()
    assert not list((tmp_path / "out").glob("source-*"))
    assert "source" not in git(repository, "worktree", "list")


def test_a_checkout_that_was_cut_off_is_made_again(repository, tmp_path):
    revision = Revision.find("HEAD")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tree").mkdir()

    with check_out(revision, tmp_path / "source", is_kept=True) as tree:
        assert (tree / "server.py").exists()

    assert (tmp_path / "source" / "tree" / "server.py").exists()
    remove_check_out(revision, tmp_path / "source")
    assert not (tmp_path / "source").exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_the_state_of_another_bisection_is_refused(repository, tmp_path):
    _, state, _ = bisection(repository, tmp_path)
    state.write(tmp_path / "out")
    other = Question.of("HEAD~5", "HEAD", "ttft_p50_ms", BenchConfig(), SERVER)

    with pytest.raises(UsageError, match="different: metric"):
        BisectionRuns.open(tmp_path / "out", other)


def test_an_invalid_run_is_repeated_once(repository, tmp_path):
    commit = git(repository, "rev-parse", "HEAD~5")[:12]
    bisector, state, measure = bisection(repository, tmp_path, invalid=[f"run01-{commit}"])

    assert bisector.run(state, measure).first_changed == 3
    assert measure.measured[1] == f"run01-{commit}-again1"


@pytest.mark.parametrize(("status", "message"), [("invalid", "is invalid"), ("overloaded", "cannot be compared")])
def test_trust_W7_a_revision_that_is_invalid_or_overloaded_twice_ends_the_bisection(
    repository, tmp_path, status, message
):
    name = f"run01-{git(repository, 'rev-parse', 'HEAD~5')[:12]}"
    bisector, state, measure = bisection(repository, tmp_path, invalid=[name, f"{name}-again1"], status=status)

    with pytest.raises(MeasurementError, match=f"2 runs of .* gave no value: .* {message}: too few"):
        bisector.run(state, measure)


def test_ends_that_are_not_on_one_line_are_refused(repository):
    with pytest.raises(UsageError, match="does not descend"):
        Question.of("HEAD", "HEAD~5", METRIC, BenchConfig(), SERVER)


def test_a_server_command_without_the_checkout_is_refused():
    with pytest.raises(UsageError, match=r"must contain \{tree\}"):
        check_server("python server.py")


@pytest.mark.slow
def test_a_real_bisection_of_a_small_repository(repository, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    load = ["--concurrency", "2", "--requests", "32", "--warmup", "0s", "--input-tokens", "8", "--output-tokens", "12"]
    words = ["bisect", "HEAD~5", "HEAD", "--metric", METRIC, "--server", SERVER, "--out", str(tmp_path / "out"), *load]

    code = cli.main([*words, "--json"])

    written = capsys.readouterr()
    assert code == 0, written.err
    found = json.loads(written.out)
    assert found["commit"] == git(repository, "rev-parse", "HEAD~2")
    assert found["relative_change"] == pytest.approx(0.6, abs=0.25)
