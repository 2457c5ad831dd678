"""Exit codes of `tgi-bench run --fail-on-slo`, on made-up runs of known truth."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from loadgen import cli, program
from loadgen.commands import run as run_command
from loadgen.config.objectives import objectives_of
from reports.metrics.finish_run import finish_run
from reports.run_store import load_manifest, write_manifest
from tests.support.samples.sample_run import SampleLoad, write_sample_run

Run = Callable[..., int]


@pytest.fixture(scope="module")
def sample_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[SampleLoad], Path]:
    """The directory of a finished sample, written once for each load."""

    @cache
    def finished(load: SampleLoad) -> Path:
        directory = tmp_path_factory.mktemp("samples") / "r"
        write_sample_run(directory, load)
        finish_run(directory)
        return directory

    return finished


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample_of: Callable[[SampleLoad], Path]) -> Run:
    """Runs the command; the measurement is a sample with the objectives of the command line."""
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)

    def main(*slo: str, load: SampleLoad, flags: tuple[str, ...] = ("--fail-on-slo",)) -> int:
        def measure(config: object, distribution: object, out: Path, words: object, progress: object) -> None:
            shutil.copytree(sample_of(load), out, dirs_exist_ok=True)
            manifest = load_manifest(out)
            manifest.objectives = objectives_of(slo)
            manifest.price_per_hour = 3.6
            write_manifest(out, manifest)

        monkeypatch.setattr(run_command, "measure_server", measure)
        objectives = [word for each in slo for word in ("--slo", each)]
        return cli.main(["run", "--requests", "9", *objectives, *flags, "--out", str(tmp_path / "r")])

    return main


LONG = SampleLoad(mode="closed", duration_s=30, failure_share=0.0)
SHORT = SampleLoad(mode="closed", duration_s=8, concurrency=4, failure_share=0.0)


def test_pages_2_objectives_that_are_met_exit_0(run_of: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_of("ttft_p95_ms < 60000", "tpot_mean_ms < 5000", load=LONG) == 0

    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines() if " met " in line] == ["TTFT", "TPOT"]
    assert "objectives missed" not in printed.err
    assert "objectives undecided" not in printed.err


def test_pages_2_a_missed_objective_exits_1_and_is_named(
    run_of: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_of("ttft_p95_ms < 60000", "ttft_p95_ms < 0.01", load=LONG) == 1

    assert "objectives missed: TTFT p95 ≤ 0.01 ms" in capsys.readouterr().err
    results = json.loads((tmp_path / "r/summary.json").read_text())["slo"]["results"]
    assert [each["decision"] for each in results] == ["met", "missed"]


def test_pages_2_an_objective_that_the_run_cannot_decide_exits_3(
    run_of: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_of("ttft_p95_ms < 60000", load=SHORT) == 3
    assert "objectives undecided: TTFT p95 ≤ 60000 ms; run longer" in capsys.readouterr().err


@pytest.mark.slow
def test_pages_2_without_the_flag_a_missed_objective_is_printed_and_exits_0(
    run_of: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_of("ttft_p95_ms < 0.01", load=LONG, flags=()) == 0
    assert " missed " in capsys.readouterr().out


@pytest.mark.slow
def test_pages_2_the_cost_is_printed_per_million_output_tokens(
    run_of: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of("ttft_p95_ms < 60000", load=LONG)

    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cost ")]
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    expected = 3.6 / 3600 * 1e6 / summary["rates"]["output_tokens_per_s"]["value"]
    assert float(line.split()[1]) == pytest.approx(expected, rel=0.01)
    assert line.endswith(" per million output tokens, at 3.6 per hour")


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ((), "`fail_on_slo` is set but there is no objective"),
        (("ttft_s < 0.5",), "cannot decide the objective 'ttft_s"),
    ],
)
def test_pages_2_an_objective_that_no_run_decides_is_refused_before_the_run(
    run_of: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], slo: tuple[str, ...], message: str
) -> None:
    assert run_of(*slo, load=LONG) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
