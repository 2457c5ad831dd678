import os
import stat
from pathlib import Path

import pytest

from reference_server.launcher.environment import environment_report


def test_a_tool_that_is_missing_is_not_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    report = environment_report()

    assert report.startswith("Runtime environment\ntarget: ")
    assert "\nnvidia-smi: N/A\nxpu-smi: N/A\nhl-smi: N/A\n" in report


def test_the_output_of_a_tool_is_indented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho first\necho second\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    assert "\nnvidia-smi: \n    first\n    second\n" in environment_report()


def test_a_feature_that_is_not_installed_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reference_server.launcher.environment._is_installed", lambda module: module != "flash_attn")

    report = environment_report()

    assert "missing: attention with softcap and ALiBi on CUDA: pip install 'tgi-bench[flash-attn]'" in report
    assert "tgi-bench[server]" not in report
