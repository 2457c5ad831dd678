import pytest

from reference_server import observability
from reference_server.launcher.children import Programs
from reference_server.launcher.cli import main

NOTHING = Programs(("/nonexistent/server",), ("/nonexistent/router",))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's log set-up belongs to its process, not to the tests'."""
    monkeypatch.setattr("reference_server.launcher.cli.set_up_logging", lambda *_: None)


def launch(*argv: str, **environ: str) -> int:
    return main(["--model-id", "preset:tiny-llama", *argv], environ, NOTHING)


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        pytest.param(
            ["--max-input-tokens", "8", "--max-input-length", "8"], {}, "ArgumentValidation: `max_input_tokens` and",
            id="test_launcher_L1",
        ),
        pytest.param(
            ["--max-input-tokens", "1024", "--max-total-tokens", "1024"], {},
            "ArgumentValidation: `max_input_tokens` must be < `max_total_tokens`", id="test_launcher_L2",
        ),
        pytest.param(
            ["--sharded", "true"], {"CUDA_VISIBLE_DEVICES": "0"}, "NotEnoughCUDADevices: `sharded` is true",
            id="test_launcher_L3",
        ),
        pytest.param(
            ["--quantize", "exl2", "--num-shard", "2"], {}, "ArgumentValidation: `quantize` exl2 cannot be sharded",
            id="test_launcher_L6",
        ),
        pytest.param(
            ["--attention", "flashdecoding-ipex"], {},
            "ArgumentValidation: `--attention flashdecoding-ipex` is not served yet: flashdecoding-ipex needs Intel",
            id="not served",
        ),
        pytest.param(
            [], {"ZE_AFFINITY_MASK": "0"}, "ArgumentValidation: ZE_AFFINITY_MASK requests", id="foreign device"
        ),
        pytest.param(
            ["--port", "0"], {}, "ShardCannotStart: /nonexistent/server cannot be started", id="missing program"
        ),
    ],
)  # fmt: skip
def test_a_launch_that_cannot_work_is_one_error_line(
    argv: list[str], environ: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*argv, **environ) == 1

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"Error: {message}")


def test_a_wrong_flag_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch("--num-shards", "2")

    assert caught.value.code == 2
    assert "the nearest valid one is '--num-shard'" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "-V"):
        with pytest.raises(SystemExit) as caught:
            launch(flag)
        assert caught.value.code == 0

    assert "text-generation-launcher" in capsys.readouterr().out


def test_the_log_format_is_chosen_by_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = []
    monkeypatch.setattr(
        "reference_server.launcher.cli.set_up_logging", lambda level, form: formats.append((level, form))
    )

    launch("--json-output", "--quantize", "awq", LOG_LEVEL="warn")

    assert formats == [("warn", observability.LogFormat.JSON)]


def test_variables_of_tgi_without_effect_are_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "reference_server.launcher.cli"):
        launch("--port", "0", DISABLE_EXLLAMA="True", FLASH_INFER="1")

    warnings = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert len(warnings) == 1
    assert "DISABLE_EXLLAMA (" in warnings[0]
    assert "FLASH_INFER (" in warnings[0]
