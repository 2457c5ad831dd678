import pytest

from reference_server.launcher import sagemaker
from reference_server.launcher.sagemaker import launcher_environment, main

PLATFORM = {
    "HF_MODEL_ID": "preset:tiny-llama",
    "HF_MODEL_REVISION": "main",
    "SM_NUM_GPUS": "2",
    "HF_MODEL_QUANTIZE": "eetq",
    "HF_MODEL_TRUST_REMOTE_CODE": "1",
}


def test_the_platforms_variables_override_the_launchers() -> None:
    assert launcher_environment({"MODEL_ID": "other", "PATH": "/bin", "SM_NUM_GPUS": "", **PLATFORM}) == {
        "PATH": "/bin",
        "MODEL_ID": "preset:tiny-llama",
        "REVISION": "main",
        "NUM_SHARD": "2",
        "QUANTIZE": "eetq",
        "TRUST_REMOTE_CODE": "true",
    }


def test_an_empty_variable_counts_as_unset() -> None:
    assert launcher_environment({"NUM_SHARD": "4", "SM_NUM_GPUS": "", "HF_MODEL_ID": "a"}) == {
        "NUM_SHARD": "4",
        "MODEL_ID": "a",
    }


def test_the_launcher_gets_port_8080_and_not_the_word_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(sagemaker, "launch", lambda *arguments: launched.append(arguments) or 7)

    assert main(["serve", "--json-output"], {"HF_MODEL_ID": "a"}) == 7
    assert launched == [(["--port", "8080", "--json-output"], {"MODEL_ID": "a"})]


def test_a_missing_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"MODEL_ID": "a"}) == 1
    assert "HF_MODEL_ID must be set" in capsys.readouterr().err
