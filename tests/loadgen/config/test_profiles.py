"""Named loads: their settings, how they are overridden, and that they run."""

import argparse

import pytest

from loadgen.cli import main
from loadgen.config import load_flags, parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.config.profiles import BLOOM_K6_LENGTHS, PROFILES
from loadgen.runner import measure
from loadgen.target.target import Target
from loadgen.workloads.lengths import read_pairs
from reports.metrics.summary import Analysis
from reports.pages.run_page import build_run_report
from reports.pages.sections.run_tables import k6_table
from reports.renderers.markdown import render
from tests.support.measured_requests import measured
from tests.support.servers.stream_server import Script, ServerState, stream_server


@pytest.mark.parametrize("name", PROFILES)
def test_servers_6_a_profile_is_a_valid_load_with_its_settings(name):
    config = BenchConfig(profile=name)

    assert {setting: getattr(config, setting) for setting in PROFILES[name].settings} == dict(PROFILES[name].settings)
    assert BenchConfig.model_validate(config.model_dump(mode="json")) == config


def test_servers_6_flags_and_files_override_a_profile(tmp_path):
    file = tmp_path / "load.toml"
    file.write_text('profile = "rag"\nprefix_tokens = 50\n')

    config = parsing.load(BenchConfig, {"output_tokens": "9"}, file)

    assert (config.workload, config.prefix_tokens, config.output_tokens) == ("shared_prefix", 50, "9")
    assert config.input_tokens == PROFILES["rag"].settings["input_tokens"]


def test_servers_6_help_lists_every_profile_and_its_use():
    parser = argparse.ArgumentParser()
    load_flags.add_flags(parser)

    text = " ".join(parser.format_help().split())
    for name, profile in PROFILES.items():
        assert f"`{name}`: {' '.join(profile.models.split()[:3])}" in text


def test_servers_6_a_profile_with_its_own_stages_cannot_be_swept(capsys):
    assert main(["sweep", "--profile", "bloom-k6", "--points", "1,2"]) == 2
    assert "`mode` is 'stages' but must be closed" in capsys.readouterr().err


def test_servers_6_an_unknown_profile_is_refused_with_the_known_ones(capsys):
    assert main(["run", "--profile", "bloom", "--dry-run"]) == 2
    assert "'bloom-k6'" in capsys.readouterr().err


def test_servers_6_bloom_k6_sends_blocking_calls_of_seven_lengths_and_has_k6s_columns(tmp_path):
    config = BenchConfig(profile="bloom-k6", stages="1s:4,1s:0", think_time="0", label="New batching logic")

    with stream_server(ServerState(script=lambda body: Script(first_s=0.1))) as (url, _):
        result = measure(config, Target(url), tmp_path / "r")

    assert {record.requested_output_tokens for record in measured(result)} <= {
        b for _, b in read_pairs(BLOOM_K6_LENGTHS)
    }
    assert {record.events for record in measured(result)} == {0}
    analysis = Analysis.of(result)
    [row] = k6_table([analysis]).to_dict("records")
    assert list(row) == ["E2E, s ↓", "avg", "min", "med", "max", "p(90)", "p(95)", "RPS ↑"]
    assert 0.1 <= row["min"] <= row["med"] <= row["p(95)"] <= row["max"]
    assert row["RPS ↑"] == analysis.summary["rates"]["requests_per_s"]["value"]
    assert b"first load test" in render(build_run_report([analysis]))
