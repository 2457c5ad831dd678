import io

import pytest

from loadgen.progress import LineProgress, SilentProgress, TerminalProgress, Verbosity, open_progress
from loadgen.terminal.progress_line import Position, RunLength


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


def message(t_s):
    return {"t_s": t_s, "phase": "measure", "in_flight": 8, "completed": 3, "failed": 0, "tokens_out": 100}


def test_plain_progress_is_a_line_every_few_seconds():
    stream = io.StringIO()
    progress = open_progress(stream)

    for second in range(1, 12):
        progress.update(message(second))

    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["5", "10"]


def test_a_second_run_is_shown_like_the_first():
    stream = io.StringIO()
    progress = open_progress(stream)
    progress.update(message(30.0))
    progress.close()

    progress.update(message(5.0))

    assert len(stream.getvalue().splitlines()) == 2


def test_output_of_a_server_cannot_control_the_terminal():
    stream = io.StringIO()

    open_progress(stream).show("the server ended:\n\x1b[2Jgone \u202etxt.exe")

    assert stream.getvalue() == "the server ended:\n\N{REPLACEMENT CHARACTER}[2Jgone \N{REPLACEMENT CHARACTER}txt.exe\n"


@pytest.mark.parametrize(
    ("stream", "verbosity", "ci", "kind"),
    [
        (Terminal(), Verbosity.NORMAL, "", TerminalProgress),
        (Terminal(), Verbosity.NORMAL, "true", LineProgress),
        (Terminal(), Verbosity.VERBOSE, "", LineProgress),
        (Terminal(), Verbosity.QUIET, "", SilentProgress),
        (io.StringIO(), Verbosity.NORMAL, "", LineProgress),
    ],
)
def test_pages_2_lines_in_a_pipe_and_in_ci(monkeypatch, stream, verbosity, ci, kind):
    monkeypatch.setenv("CI", ci)

    assert type(open_progress(stream, verbosity)) is kind


def test_pages_2_a_line_of_a_log_has_the_place_and_the_share():
    stream = io.StringIO()
    progress = open_progress(stream)
    progress.place(Position("point", 2, 5))
    progress.begin(RunLength(0, 20))

    progress.update(message(5.0))

    assert stream.getvalue().startswith("point 2 of 5: 5 s measure, 25 %, 0:15 left, 8 running")


def test_verbose_lines_come_every_second():
    stream = io.StringIO()
    progress = open_progress(stream, Verbosity.VERBOSE)

    for second in range(1, 4):
        progress.update(message(second))

    assert len(stream.getvalue().splitlines()) == 3


def test_a_terminal_shows_one_line_and_removes_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = open_progress(stream)
    progress.place(Position("point", 1, 2))
    progress.begin(RunLength(0, 10))
    progress.update(message(5.0))
    progress.show("a message")
    progress.place(None)

    assert "point 1 of 2" in stream.getvalue()
    assert "a message\n" in stream.getvalue().replace("\r", "")


def test_pages_2_a_series_without_a_load_shows_its_own_word(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = open_progress(stream)
    progress.place(Position("fleet", 1, 2, idle="simulating"))
    progress.place(None)

    assert "fleet 1 of 2: simulating, 0:00" in stream.getvalue()
    assert "between loads" not in stream.getvalue()


def test_pages_2_the_time_between_two_runs_counts_from_the_end_of_the_first(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream, now = Terminal(), [0.0]
    progress = TerminalProgress(stream, lambda: now[0])
    progress.place(Position("point", 1, 2))
    progress.update(message(5.0))
    now[0] = 69.0
    progress.close()
    shown = stream.getvalue().rpartition("8 running")[2]
    progress.place(None)

    assert "point 1 of 2: between loads, 0:00" in shown
