from pathlib import Path

import pytest

from loadgen.config.parsing import read_toml
from loadgen.errors import UsageError
from reference_server import json_files
from reference_server.errors import StartupError
from reference_server.json_files import read_json
from reports.run_store import RunDirectoryError
from reports.run_store import read_json as read_stored
from reports.saved_run import load_run

NESTED = '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (NESTED, "nested too deeply"),
        ("{", "cannot be read"),
        ("[]", "no table of settings"),
        ('"' + "\xff" * 70, "cannot be read"),
    ],
)
def test_hardening_R26_a_file_of_a_model_is_read_or_refused_with_its_path(tmp_path: Path, content: str, fault: str):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="latin-1")

    with pytest.raises(StartupError, match=fault) as refused:
        read_json(path)
    assert str(path) in str(refused.value)


def test_hardening_R26_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_files, "MAX_BYTES", 100)
    (tmp_path / "config.json").write_text(" " * 200 + "{}")

    with pytest.raises(StartupError, match="larger than 100 bytes"):
        read_json(tmp_path / "config.json")


def test_hardening_R26_nested_files_of_a_run_and_of_a_load_are_refused(tmp_path: Path):
    (tmp_path / "manifest.json").write_text(NESTED)
    (tmp_path / "bench.toml").write_text("a = " + "[" * 100_000)

    with pytest.raises(RunDirectoryError, match="not JSON"):
        read_stored(tmp_path / "manifest.json")
    with pytest.raises(RunDirectoryError, match=r"manifest\.json"):
        load_run(tmp_path)
    with pytest.raises(UsageError, match="not TOML"):
        read_toml(tmp_path / "bench.toml")
