import pytest

from tuner.errors import StudyError
from tuner.study.storage import open_storage, redacted
from tuner.study.study_folder import StudyFolder


def test_a_study_has_one_run_at_a_time(tmp_path):
    files = StudyFolder(tmp_path)
    with files.lock(), pytest.raises(StudyError, match="tgi-tune worker"), files.lock():
        pass


@pytest.mark.parametrize("text", ["mongodb://x", "grpc://nowhere", "file"])
def test_an_unknown_storage_is_refused(tmp_path, text):
    with pytest.raises(StudyError, match="grpc://HOST:PORT"):
        open_storage(text, tmp_path)


def test_a_password_is_not_shown():
    assert redacted("postgresql://me:secret@db/studies") == "postgresql://me:***@db/studies"
    assert redacted("sqlite:studies.db") == "sqlite:studies.db"
