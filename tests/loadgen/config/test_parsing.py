import argparse

import pytest

from loadgen.config import load_flags, parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError


def load(**given):
    return parsing.load(BenchConfig, given)


def test_defaults_are_a_closed_loop_of_half_a_minute():
    config = load()

    assert (config.mode, config.concurrency, config.duration_s, config.warmup_s) == ("closed", 8, 30.0, 3.0)


def test_text_from_a_command_line_becomes_values():
    config = load(mode="poisson", rate="2.5", duration="1.5m", warmup="500ms", input_tokens="uniform:64,256")

    assert (config.rate, config.duration_s, config.warmup_s) == (2.5, 90.0, 0.5)
    assert config.input_tokens == "uniform:64,256"


def test_a_run_of_n_requests_has_no_default_duration_or_warm_up():
    config = load(requests="100")

    assert (config.duration_s, config.warmup_s) == (None, 0.0)


def test_a_run_of_n_requests_drains_as_long_as_a_request_may_take():
    assert load(requests="100").drain_s == 600.0
    assert load(duration="5s").drain_s == 30.0
    assert load(requests="100", drain="5s").drain_s == 5.0


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "bench.toml"
    file.write_text('mode = "constant"\nrate = 5\ninput_tokens = 32\n')

    config = parsing.load(BenchConfig, {"rate": "7", "mode": None}, file)

    assert (config.mode, config.rate, config.input_tokens) == ("constant", 7.0, "32")


def test_every_field_has_a_flag():
    parser = argparse.ArgumentParser()
    load_flags.add_flags(parser)

    arguments = vars(parser.parse_args(["--max-in-flight", "3", "--time-scale", "0.5"]))

    assert arguments.keys() == BenchConfig.model_fields.keys()
    assert (arguments["max_in_flight"], arguments["time_scale"]) == ("3", "0.5")


def test_objectives_are_given_once_each():
    parser = argparse.ArgumentParser()
    load_flags.add_flags(parser)

    given = parser.parse_args(["--slo", "ttft_p95_ms < 500", "--slo", "tpot_mean_ms<50"])

    assert load(**vars(given)).slo == ("ttft_p95_ms < 500", "tpot_mean_ms<50")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"concurrency": "0"}, "`concurrency` is '0': input should be greater than or equal to 1"),
        ({"mode": "sweep"}, "`mode` is 'sweep': 'sweep' is a command of its own: tgi-bench sweep"),
        ({"workload": "sharegpt"}, "`prompts_file` is required by workload 'sharegpt'"),
        (
            {"workload": "multi_turn", "mode": "poisson", "rate": "1"},
            "'multi_turn' requires mode 'sessions' or 'closed'",
        ),
        ({"turns": "3"}, "`turns` is 3 but workload 'synthetic' has no turns"),
        ({"prefix_groups": "3"}, "`prefix_groups` needs workload 'shared_prefix', not 'synthetic'"),
        ({"prefix_cache": "warm"}, "`prefix_cache` is 'warm' but only workload 'shared_prefix' has known"),
        ({"mode": "stages"}, "`stages` is None but mode is 'stages'"),
        ({"mode": "stages", "stages": "30s"}, "'30s' is not a stage"),
        ({"workers": "0"}, "`workers` is '0': input should be greater than or equal to 1"),
        ({"duration": "20 parsecs"}, "`duration` is '20 parsecs': not a duration"),
        ({"duration": "0"}, "`duration` is 0 but must be above 0"),
        ({"input_tokens": "zipf:3"}, "`input_tokens` is 'zipf:3'"),
        ({"mode": "constant"}, "`rate` is required by mode 'constant'"),
        ({"rate": "3"}, "`rate` is 3.0 but mode 'closed' has no rate"),
        ({"mode": "burst"}, "`requests` is required by mode 'burst'"),
        ({"mode": "trace"}, "`workload` is 'synthetic' but mode 'trace' requires one of azure_llm, burstgpt, mooncake"),
        ({"workload": "mooncake"}, "`trace_file` is required by workload 'mooncake'"),
        ({"trace_limit": "3"}, "`trace_limit` is 3 but workload is 'synthetic'; it applies to azure_llm"),
        ({"time_scale": "0.5"}, "`time_scale` is 0.5 but mode is 'closed'; only 'trace' has arrival times"),
        ({"workload": "prompts"}, "`prompts_file` is required by workload 'prompts'"),
        ({"max_in_flight": "3"}, "`max_in_flight` is 3 but mode 'closed'"),
        ({"url": "localhost:80"}, "`url` is 'localhost:80': must look like http://HOST:PORT"),
        ({"url": "http://h", "server": "x"}, "`url` and `server` exclude each other"),
        ({"seed": "-1"}, "`seed` is '-1'"),
        ({"slo": ["ttft"]}, "'ttft' is not an objective; write it as"),
        ({"max_error_share": "1.5"}, "`max_error_share` is '1.5'"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_limit(given, message):
    with pytest.raises(UsageError) as refused:
        load(**given)

    assert message in str(refused.value)
    assert refused.value.exit_code == 2


def test_an_unknown_key_and_a_broken_file_are_refused(tmp_path):
    file = tmp_path / "bench.toml"

    file.write_text("concurency = 3")
    with pytest.raises(UsageError, match="`concurency` is not a setting of a load"):
        parsing.load(BenchConfig, {}, file)
    file.write_text("concurrency = = 3")
    with pytest.raises(UsageError, match="not TOML"):
        parsing.load(BenchConfig, {}, file)
    with pytest.raises(UsageError, match="No such file"):
        parsing.load(BenchConfig, {}, tmp_path / "absent.toml")


def test_the_api_key_of_a_server_is_never_shown():
    config = load(api_key="hunter2")

    assert "hunter2" not in str(config.model_dump(mode="json"))
    assert "hunter2" not in repr(config)
