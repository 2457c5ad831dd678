import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.runner import measure
from loadgen.target.target import Target
from loadgen.workloads.shapes import ConstantShape, StagedUsers
from loadgen.workloads.think_time import parse_think_time
from tests.support.servers.stream_server import Script, ServerState, stream_server


def test_users_enter_when_the_line_reaches_their_number_and_may_enter_again():
    shape = StagedUsers(((10.0, 10.0), (10.0, 0.0), (10.0, 10.0)))

    assert [shape.users(t_s) for t_s in (0, 4.99, 5, 10, 15, 20, 25, 40)] == [0, 4, 5, 10, 5, 0, 5, 10]
    assert shape.entry_s(0, 0.0) == 1.0
    assert shape.entry_s(4, 3.0) == 5.0
    assert shape.entry_s(4, 12.0) == 12.0
    assert shape.entry_s(4, 17.0) == 25.0
    assert shape.entry_s(10, 0.0) is None


@pytest.mark.parametrize(
    ("load", "shape", "users", "is_open_loop"),
    [
        ({"concurrency": 3}, ConstantShape(3), 3, False),
        ({"concurrency": 4, "ramp_up": "2s"}, StagedUsers(((2.0, 4),)), 4, False),
        ({"mode": "stages", "stages": "2s:4,1s:9"}, ConstantShape(8), 8, True),
        (
            {"mode": "stages", "stages": "2s:4,1s:9", "stages_of": "concurrency"},
            StagedUsers(((2.0, 4.0), (1.0, 9.0))),
            9,
            False,
        ),
    ],
)
def test_a_load_has_the_users_of_its_settings(load, shape, users, is_open_loop):
    config = BenchConfig(**load)

    assert (config.shape, config.users, config.is_open_loop) == (shape, users, is_open_loop)


@pytest.mark.slow
def test_metrics_8_stages_of_concurrency_follow_their_line(tmp_path):
    state = ServerState(script=lambda body: Script(first_s=0.02, gap_s=0.005))
    load = {"mode": "stages", "stages_of": "concurrency", "stages": "1s:4,500ms:4,500ms:0"}

    with stream_server(state) as (url, _):
        result = measure(BenchConfig(**load, input_tokens="8", output_tokens="3"), Target(url), tmp_path / "r")

    def in_flight(at_s):
        return sum(record.t_sent_ns <= at_s * 1e9 < record.t_end_ns for record in result.records)

    assert not result.manifest.is_open_loop
    assert result.manifest.stop_reason == "duration"
    assert max(in_flight(at_s / 100) for at_s in range(0, 25)) == 0
    assert max(in_flight(at_s / 100) for at_s in range(30, 49)) <= 1
    assert max(in_flight(at_s / 100) for at_s in range(100, 150)) == 4
    assert min(record.t_intended_ns for record in result.records) >= 0.25e9
    assert len(state.requests) > 20


def test_think_times_are_drawn_by_prompt_and_seed():
    uniform, exponential = parse_think_time("uniform:1s,3s", 1), parse_think_time("exponential:500ms", 1)
    drawn = [exponential.after(f"p{index}") for index in range(4_000)]

    assert parse_think_time("0.5").after("p") == 0.5
    assert all(1 <= uniform.after(f"p{index}") <= 3 for index in range(100))
    assert uniform.after("p") == parse_think_time("uniform:1s,3s", 1).after("p")
    assert uniform.after("p") != parse_think_time("uniform:1s,3s", 2).after("p")
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"think_time": "often"}, "not a duration"),
        ({"think_time": "uniform:3s,1s"}, "not a think time"),
        ({"think_time": "exponential:0"}, "not a think time"),
        ({"think_time": "2s", "mode": "poisson", "rate": 3}, "have think times"),
        ({"ramp_up": "2s", "mode": "poisson", "rate": 3}, "has a ramp-up"),
        ({"stages_of": "concurrency"}, "mode is 'closed', not 'stages'"),
    ],
)
def test_contradictory_settings_of_users_are_refused(load, message):
    with pytest.raises(ValueError, match=message):
        BenchConfig(**load)
