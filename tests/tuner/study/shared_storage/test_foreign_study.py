"""A study in a storage that others can write: it runs no command and opens no path here unless that is allowed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.studies import FormulaServer, open_search
from tuner.cli import main
from tuner.config import TuneConfig
from tuner.errors import StudyError
from tuner.study.optuna_study import OptunaStudy
from tuner.study.prepare_study import stored, stored_in
from tuner.study.search_worker import SearchWorker
from tuner.study.shared_storage.foreign_config import local_parts
from tuner.study.shared_storage.foreign_result import why_outside
from tuner.trial.outcome import TrialResult

IDENTITY = {"space": "s", "ranges": "r", "load": "l", "build": "b", "device": "d"}


def written(tmp_path: Path, name: str = "s", **sections: Any) -> str:
    """The storage of a study that another user wrote."""
    storage = f"sqlite:{tmp_path}/studies.db"
    study = OptunaStudy(tmp_path, seed=0, storage=storage, name="x")
    config = json.loads(TuneConfig.model_validate(sections).model_dump_json(by_alias=True))
    for key, value in {"name": name, "config": config, "identity": IDENTITY}.items():
        study.set_attribute(key, value)
    return storage


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("server.command", {"server": {"kind": "command", "command": "sh -c 'touch owned'"}}),
        ("server.command", {"server": {"kind": "tgi-launcher", "command": "/tmp/launcher"}}),
        ("server.image", {"server": {"kind": "tgi-docker", "image": "evil/image"}}),
        ("server.volume", {"server": {"kind": "tgi-docker", "volume": "/:/data"}}),
        ("server.profile", {"server": {"profile": "/tmp/profile.toml"}}),
        ("server.model_id", {"server": {"model_id": "../../etc"}}),
        ("server.fixed.trust_remote_code", {"server": {"fixed": {"trust_remote_code": True}}}),
        ("server.fixed.tokenizer_config_path", {"server": {"fixed": {"tokenizer_config_path": "/etc/passwd"}}}),
        ("param.quantize.values", {"param": {"quantize": {
            "type": "choice", "values": [{"value": "none", "model_id": "/tmp/model"}]}}}),
        ("param.trust_remote_code", {"param": {"trust_remote_code": {"type": "bool"}}}),
        ("quality.command", {"quality": {"command": "./judge"}}),
        ("load.prompts_file", {"load": {"prompts_file": "/etc/passwd"}}),
        ("load.input_tokens", {"load": {"input_tokens": "empirical:/etc/passwd"}}),
    ],
)  # fmt: skip
def test_hardening_S1_commands_and_paths_of_a_storage_need_allow_command(
    tmp_path: Path, key: str, sections: dict[str, Any]
):
    assert key in local_parts(TuneConfig.model_validate(sections))


def test_hardening_S1_a_worker_prints_and_refuses_commands_of_a_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    storage = written(tmp_path, server={"kind": "command", "command": "sh -c 'touch owned'"})

    assert main(["worker", "--storage", storage, "--dry-run"]) == 2

    assert "server.command = \"sh -c 'touch owned'\"\ncheck them, then add --allow-command" in capsys.readouterr().err
    assert not (tmp_path / "studies").exists()


def test_hardening_S1_an_allowed_command_stays_allowed_until_it_changes(tmp_path: Path):
    folder = tmp_path / "studies"
    server = {"kind": "command", "command": "serve {port}"}
    storage = written(tmp_path, server=server)

    stored_in(storage, None, folder, is_allowed=True)
    assert stored_in(storage, None, folder).config.server.command == "serve {port}"

    written(tmp_path, server={**server, "command": "other {port}"})
    with pytest.raises(StudyError, match="other"):
        stored_in(storage, None, folder)


def test_hardening_S1_a_plain_study_of_a_storage_needs_no_permission(tmp_path: Path):
    storage = written(
        tmp_path,
        server={"model_id": "org/model", "fixed": {"quantize": "eetq", "max_input_tokens": 512}},
        load={"concurrency": 4, "input_tokens": "uniform:64,512"},
    )

    assert stored_in(storage, None, tmp_path / "studies").name == "s"


@pytest.mark.parametrize(
    "name",
    ["../escaped", *(pytest.param(name, marks=pytest.mark.slow) for name in ("/tmp/escaped", "a/b")), ".hidden", ""],
)
def test_hardening_S1_the_name_of_a_stored_study_is_a_plain_folder(tmp_path: Path, name: str):
    with pytest.raises(StudyError, match="not a plain folder name"):
        stored_in(written(tmp_path, name), None, tmp_path / "studies")
    if name:
        with pytest.raises(StudyError, match="not a plain folder name"):
            stored(name, tmp_path / "studies")

    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"trust_remote_code": True}, "`trust_remote_code` is True"),
        ({"model_id": "/tmp/model"}, "`model_id` is '/tmp/model'"),
        ({"max_batch_prefill_tokens": "$(id)"}, "`max_batch_prefill_tokens` is '$(id)'"),
        ({"quantize": "/tmp/x"}, "`quantize` is '/tmp/x'"),
        ({"prefill_chunking": 1}, "`prefill_chunking` is 1"),
        ({"max_batch_prefill_tokens": 10**9}, None),
        ({}, None),
    ],
)
def test_hardening_S1_a_result_has_settings_of_the_space_only(
    tmp_path: Path, changed: dict[str, Any], reason: str | None
):
    search = open_search(tmp_path / "s", FormulaServer())
    settings = {**search.fixed, "max_batch_prefill_tokens": 1024, **changed}

    assert why_outside(TrialResult(3, settings, "measured"), search.space, search.fixed, search.server) == reason


def test_hardening_S1_a_foreign_result_is_neither_stored_nor_confirmed(tmp_path: Path):
    search = open_search(tmp_path / "s", FormulaServer(), sampler="random", trials=3)
    worker = SearchWorker.start(search)
    trial = worker.study.ask()
    settings = {**search.fixed, "trust_remote_code": True}
    worker.study.tell(trial, TrialResult(90, settings, "measured", value=1e9, origin="sampler"))

    worker.work()

    assert not (search.folder / "trials" / "0090").exists()
    assert all("trust_remote_code" not in each.settings for each in search.finalists(search.results()))
