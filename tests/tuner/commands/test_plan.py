"""`tgi-tune plan` from its file."""

import contextlib
import io
import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadgen import program
from loadgen.interrupts import Interrupted
from tests.tuner.commands.simulation.test_simulate import BY_HAND, ROOM
from tuner.cli import main

PLAN = """[plan]
rates = [20]
policies = ["round_robin"]
spare = 1
price_per_replica_hour = 1.2
[[plan.limit]]
metric = "ttft_p95_ms"
max = {limit}
"""


def files(tmp_path: Path, limit: str = "3000", more: str = "") -> list[str]:
    (tmp_path / "hand.json").write_text(json.dumps(BY_HAND))
    (tmp_path / "plan.toml").write_text(PLAN.format(limit=limit) + more)
    return ["plan", str(tmp_path / "plan.toml"), "--cost", str(tmp_path / "hand.json"), *ROOM, "--effort", "0.03"]


@dataclass(frozen=True)
class Planned:
    """A finished command: its exit code, its output and the folder of its report."""

    code: int
    out: str
    err: str
    folder: Path


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    folder = tmp_path_factory.mktemp("plan")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([*files(folder), "--json", "--out", str(folder)])
    return Planned(code, out.getvalue(), err.getvalue(), folder)


def test_a_plan_has_replicas_and_cost(planned: Planned):
    found = json.loads(planned.out)
    row = found["rows"][0]
    assert planned.code == 0
    assert "not measured" in found["note"]
    assert row["with_spare"] == row["replicas"] + 1
    assert row["attainment"] > 0.95
    assert row["cost_per_hour"] == pytest.approx(1.2 * row["with_spare"])
    assert (planned.folder / "plan.csv").read_text().startswith("rate,policy,replicas")
    page = (planned.folder / "report.md").read_text()
    assert f"{row['replicas']} + 1 spare replicas" in page
    assert f"{row['cost_per_hour']:.2f} per hour for 20 requests/s" in page
    assert "cost_over_attainment" in page


def test_pages_2_a_plan_shows_each_fleet(planned: Planned):
    replicas = json.loads(planned.out)["rows"][0]["replicas"]

    assert planned.err.splitlines()[:2] == [
        "sizing 1 fleets by simulation",
        f"fleet 1 of 1, 20 requests/s, round_robin: {replicas} replicas",
    ]


@pytest.mark.slow
def test_a_quiet_plan_shows_the_result_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*files(tmp_path), "--json", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_an_interrupted_plan_continues_no_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def stop(*_args: object, **_settings: object) -> None:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(program, "raise_on_signals", lambda: None)
    monkeypatch.setattr("tuner.commands.plan.size_fleet", stop)

    assert main([*files(tmp_path), "--quiet"]) == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.slow
def test_trust_P1_a_plan_notes_that_a_smaller_fleet_may_suffice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # With so few requests, fleets near saturation are not decided.
    main([*files(tmp_path, limit="1000"), "--json"])

    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["one_lost"] == "not shown to meet the target"
    assert "does not decide whether one replica less meets the target" in found["note"]


@pytest.mark.slow
def test_a_rate_profile_is_sized_for_each_hour(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    hours = [5.0] * 20 + [30.0] * 4
    day = f"[plan.rate_profile]\nrates = {hours}\nstart_delay_s = 900\nmin_dwell_s = 7200\n"

    code = main([*files(tmp_path, more=day), "--json", "--out", str(tmp_path)])

    found = json.loads(capsys.readouterr().out)
    by_rate = {row["rate"]: row["with_spare"] for row in found["rows"]}
    low, high = by_rate[5.0], by_rate[30.0]
    assert code == 0
    assert sorted(by_rate) == [5.0, 20.0, 30.0]
    assert low < high
    assert found["rate_profile"]["needed"] == [low] * 20 + [high] * 4
    # The last hour's replicas are kept through hour 0.
    assert found["rate_profile"]["running"] == [high] + [low] * 19 + [high] * 4
    assert found["rate_profile"]["hours"] == pytest.approx(19 * low + 5 * high + 0.25 * (high - low))
    assert found["rate_profile"]["static_hours"] == 24 * high
    assert (tmp_path / "figures" / "day_profile.svg").exists()


def test_an_slo_that_no_fleet_meets_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tuner.simulator.capacity_planning.fleet_size.MAX_REPLICAS", 4)

    assert main(files(tmp_path, limit="1")) == 1
    assert "the SLO is not met at 20 requests/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('[[plan.limit]]\nmetric = "output_tokens_per_s"\nmax = 1\n', "latency"),
        ("[[plan.limits]]\nmax = 1\n", "limits"),
        ("[plan.rate_profile]\nrates = [1.0]\n", "at least 24"),
    ],
    ids=["not_a_latency", "unknown_key", "half_a_day"],
)
def test_a_wrong_plan_file_is_refused(more: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(files(tmp_path, more=more)) == 2
    assert words in capsys.readouterr().err
