import doctest

import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.runner import expected_length
from loadgen.terminal import progress_line
from loadgen.terminal.progress_line import Position, RunLength, plain_line, terminal_line

MESSAGE = {"t_s": 33.0, "phase": "measure", "in_flight": 8, "completed": 30, "completed_measured": 25, "failed": 0}


def test_the_examples_hold():
    assert doctest.testmod(progress_line).failed == 0


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_pages_2_the_line_fits_and_keeps_place_percent_and_time_left(columns):
    place = str(Position("launch", 7, 15, "best so far +12 %")) if columns >= 60 else "point 2 of 5"

    line = terminal_line(MESSAGE | {"failed": 3, "ttft_p95_s": 0.25}, 12345.6, RunLength(3, 60), place, columns)

    assert len(line) <= min(columns, 80)
    assert line.startswith(place)
    assert "52 % ETA 0:30" in line


@pytest.mark.parametrize(
    ("length", "message", "share", "left_s"),
    [
        (RunLength(3, 60), {}, 33 / 63, 30.0),
        (RunLength(requests=100), {}, 0.25, 99.0),
        (RunLength(), {}, None, None),
        (RunLength(3, 60), {"phase": "drain"}, 1.0, 30.0),
    ],
)
def test_the_share_that_is_done_and_the_time_left(length, message, share, left_s):
    assert length.share(MESSAGE | message) == share
    assert length.left_s(MESSAGE | message) == left_s


@pytest.mark.parametrize(
    ("t_s", "shown", "logged"), [(6.0, " 86 % ETA 0:01", "0:01 left"), (33.0, "100 % extended", "100 %, extended")]
)
def test_pages_2_a_point_shows_its_planned_time_and_then_that_it_goes_on(t_s, shown, logged):
    config = BenchConfig(concurrency=1, duration=300.0, least_duration=4.0, independent_requests=31, warmup=3.0)
    length, message = expected_length(config, 0), MESSAGE | {"t_s": t_s}

    assert shown in terminal_line(message, 512.0, length, "point 1 of 2", 80)
    assert logged in plain_line(message, 512.0, length, "point 1 of 2")
    draining = terminal_line(message | {"phase": "drain"}, 512.0, length, "point 1 of 2", 80)
    assert "draining" in draining
    assert "%" not in draining


def test_a_line_of_a_log_has_no_bar():
    line = plain_line(MESSAGE, 512.0, RunLength(requests=100), "run 3")

    assert line == "run 3: 33 s measure, 25 %, 1:39 left, 8 running, 30 done, 0 failed, 512 tokens/s"


def test_a_draining_run_has_no_share_in_a_log():
    message = MESSAGE | {"phase": "drain", "in_flight": 1024, "failed": 1339}

    line = plain_line(message, 1512.0, RunLength(3, 60), "")

    assert line == "33 s drain, 1,024 running, 30 done, 1,339 failed, 1,512 tokens/s"


@pytest.mark.parametrize(
    ("phase", "t_s", "shown"),
    [("warmup", 28.0, "58 %, 0:20 left"), ("measure", 23.5, "100 %, 0:00 left"), ("measure", 49.0, "100 %, extended")],
)
def test_pages_2_a_longer_warmup_does_not_end_the_time_left(phase, t_s, shown):
    line = plain_line(MESSAGE | {"phase": phase, "t_s": t_s}, 512.0, RunLength(3, 20), "")

    assert line.startswith(f"{t_s:.0f} s {phase}, {shown}, ")
