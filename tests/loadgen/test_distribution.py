import argparse

import pytest

from loadgen.config import BenchConfig
from loadgen.distribution import Address, Distribution
from loadgen.distribution_flags import add_distribution_flags, distribution_of, warnings_of
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
def test_an_address_says_what_its_default_does_not(text, address):
    assert Address.parse("join", text, Address("127.0.0.1", 5557)) == address


@pytest.mark.parametrize("text", ["host:port", "host:70000", "http://host:80", "a b"])
def test_other_text_is_refused(text):
    with pytest.raises(UsageError, match="`join` is"):
        Address.parse("join", text, Address("127.0.0.1", 5557))


def test_one_process_is_alone_unless_it_is_watched():
    assert distribution().is_alone
    assert not distribution("--web").is_alone
    assert distribution("--web").web == Address("127.0.0.1", 8089)
    assert not distribution(config=BenchConfig(workers=2)).is_alone


def test_a_master_waits_where_it_is_told():
    made = distribution("--master", "--expect-workers", "3", "--master-bind-port", "0")

    assert (made.count, made.is_open, made.bind) == (3, True, Address("127.0.0.1", 0))
    assert warnings_of(made) == []


def test_what_others_can_reach_is_warned_of():
    made = distribution("--master", "--master-bind-host", "0.0.0.0", "--web", "0.0.0.0:80")

    assert ["anyone who reaches it can" in warning for warning in warnings_of(made)] == [True, True]


def test_there_must_be_something_for_every_worker():
    with pytest.raises(UsageError, match="`max_in_flight` is 2 but there are 3 workers"):
        Distribution(3).check(BenchConfig(mode="burst", requests=9, max_in_flight=2))
    Distribution(3).check(BenchConfig(mode="burst", requests=9))


def test_a_distribution_survives_the_way_to_the_master():
    made = distribution("--master", "--web", ":0")

    assert Distribution.from_json(made.to_json()) == made
