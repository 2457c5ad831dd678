import argparse

import pytest

from loadgen.commands.run import add_distribution_flags, distribution_of, warnings_of
from loadgen.config.bench_config import BenchConfig
from loadgen.config.distribution import JOIN_KEY_VARIABLE, Address, Distribution
from loadgen.errors import UsageError


def distribution(*words, config=None):
    parser = argparse.ArgumentParser()
    add_distribution_flags(parser)
    return distribution_of(parser.parse_args(words), config or BenchConfig())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", Address("127.0.0.1", 5557)),
        ("10.0.0.1", Address("10.0.0.1", 5557)),
        (":80", Address("127.0.0.1", 80)),
        ("bench.local:80", Address("bench.local", 80)),
        ("[::1]:80", Address("::1", 80)),
        ("[::1]", Address("::1", 5557)),
    ],
)
def test_an_address_overrides_its_default(text, address):
    assert Address.parse("join", text, Address("127.0.0.1", 5557)) == address


@pytest.mark.parametrize("text", ["host:port", "host:70000", "http://host:80", "a b"])
def test_a_wrong_address_is_refused(text):
    with pytest.raises(UsageError, match="`join` is"):
        Address.parse("join", text, Address("127.0.0.1", 5557))


def test_one_process_needs_no_master_without_a_web_ui():
    assert distribution().is_alone
    assert not distribution("--web").is_alone
    assert distribution("--web").web == Address("127.0.0.1", 8089)
    assert not distribution(config=BenchConfig(workers=2)).is_alone


def test_the_flags_of_a_master_set_its_address():
    made = distribution("--master", "--expect-workers", "3", "--master-bind-port", "0")

    assert (made.count, made.is_open, made.bind) == (3, True, Address("127.0.0.1", 0))
    assert warnings_of(made) == []


def test_addresses_that_other_hosts_can_reach_are_warned_about():
    made = distribution("--master", "--master-bind-host", "0.0.0.0", "--web", "0.0.0.0:80")

    assert len(warnings_of(made)) == 2
    assert "each worker with the join key receives the server's API key" in warnings_of(made)[0]
    assert "any host that reaches it can watch" in warnings_of(made)[1]


def test_hardening_S3_a_master_draws_a_key_unless_the_environment_has_one(monkeypatch):
    monkeypatch.delenv(JOIN_KEY_VARIABLE, raising=False)
    drawn = [distribution("--master") for _ in range(2)]
    assert drawn[0].is_key_drawn
    assert len({each.key for each in drawn}) == 2
    assert all(len(each.key) == 32 for each in drawn)

    monkeypatch.setenv(JOIN_KEY_VARIABLE, "ours")
    assert (distribution("--master").key, distribution("--master").is_key_drawn) == ("ours", False)


def test_every_worker_needs_a_user_or_a_place_in_flight():
    with pytest.raises(UsageError, match="`max_in_flight` is 2 but 3 workers share it"):
        Distribution(3).check(BenchConfig(mode="burst", requests=9, max_in_flight=2))
    Distribution(3).check(BenchConfig(mode="burst", requests=9))


def test_a_distribution_survives_json():
    made = distribution("--master", "--web", ":0")

    assert Distribution.from_json(made.to_json()) == made
