import pytest

from tuner.errors import StudyError
from tuner.study.optuna_study import OptunaStudy
from tuner.study.shared_storage.storage import JOURNAL_FILE, open_storage
from tuner.study.study_folder import StudyFolder


def test_a_study_has_one_run_at_a_time(tmp_path):
    files = StudyFolder(tmp_path)
    with files.lock(), pytest.raises(StudyError, match="tgi-tune worker"), files.lock():
        pass


@pytest.mark.parametrize("text", ["mongodb://x", "grpc://nowhere", "file"])
def test_an_unknown_storage_is_refused(tmp_path, text):
    with pytest.raises(StudyError, match="grpc://HOST:PORT"):
        open_storage(text, tmp_path)


@pytest.mark.parametrize("text", ["mongodb://me:hunter-1@db/s", "grpc://me:hunter-1@nowhere"])
def test_hardening_S4_a_refused_storage_shows_no_password(tmp_path, text):
    with pytest.raises(StudyError) as refused:
        open_storage(text, tmp_path)

    assert "hunter" not in str(refused.value)
    assert "***@" in str(refused.value)


def test_reliability_T71_a_half_written_last_line_is_moved_out_of_the_journal(tmp_path):
    OptunaStudy(tmp_path, seed=0).set_attribute("phase", "search")
    journal = tmp_path / JOURNAL_FILE
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":')

    OptunaStudy(tmp_path, seed=0).set_attribute("phase", "confirm")

    assert OptunaStudy(tmp_path, seed=0).attributes["phase"] == "confirm"
    assert journal.read_bytes().startswith(whole)
    assert (tmp_path / f"{JOURNAL_FILE}.torn").read_bytes() == b'{"op_code":\n'


@pytest.mark.parametrize(
    ("line", "place"),
    [
        (b"garbage", "line 2"),
        (b"\xff\xfe", "line 2"),
        (b"[" * 100_000, "line 2"),
        (b'"text"', "line 2"),
        (b"[1]", "line 2"),
        (b"{}", "line 2"),
        (b'{"op_code":99,"worker_id":"w"}', "journal.log: "),
        (b'{"op_code":"0","worker_id":"w"}', "line 2"),
        (b'{"op_code":0,"worker_id":"w"}', "journal.log: "),
    ],
)
def test_reliability_107_a_journal_with_other_lines_is_refused(tmp_path, line, place):
    OptunaStudy(tmp_path, seed=0).set_attribute("phase", "search")
    journal = tmp_path / JOURNAL_FILE
    first, *rest = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(first + line + b"\n" + b"".join(rest))

    with pytest.raises(StudyError, match=f"{place}.*not a journal of Optuna"):
        OptunaStudy(tmp_path, seed=0)


@pytest.mark.parametrize("line", [b"garbage", b"\xff\xfe", b'"text"', b"{}", b'{"op_code":"0","worker_id":"w"}'])
def test_reliability_107_a_journal_that_gets_other_lines_during_a_study_is_refused(tmp_path, line):
    study = OptunaStudy(tmp_path, seed=0)
    study.set_attribute("phase", "search")
    with (tmp_path / JOURNAL_FILE).open("ab") as journal:
        journal.write(line + b"\n" + line + b"\n")

    with pytest.raises(StudyError, match=r"journal\.log, line \d+: not a journal of Optuna.*restore the file"):
        study.set_attribute("phase", "confirm")
