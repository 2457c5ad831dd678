import pytest

from tuner.errors import StudyError
from tuner.study.shared_storage.storage import open_storage
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
