import io

from loadgen.progress import open_progress


def message(t_s):
    return {"t_s": t_s, "phase": "measure", "in_flight": 8, "completed": 3, "failed": 0, "tokens_out": 100}


def test_plain_progress_is_a_line_every_few_seconds():
    stream = io.StringIO()
    progress = open_progress(stream)

    for second in range(1, 12):
        progress.update(message(second))

    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["5s", "10s"]


def test_a_second_run_is_shown_like_the_first():
    stream = io.StringIO()
    progress = open_progress(stream)
    progress.update(message(30.0))
    progress.close()

    progress.update(message(5.0))

    assert len(stream.getvalue().splitlines()) == 2


def test_what_a_server_wrote_cannot_steer_the_terminal():
    stream = io.StringIO()

    open_progress(stream).show("the server ended:\n\x1b[2Jgone \u202etxt.exe")

    assert stream.getvalue() == "the server ended:\n\N{REPLACEMENT CHARACTER}[2Jgone \N{REPLACEMENT CHARACTER}txt.exe\n"
