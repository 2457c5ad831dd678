import doctest

import pytest

from reference_server.transport import address
from reference_server.transport.address import grpc_target, is_loopback, tcp_url


@pytest.mark.parametrize(
    ("url", "target"),
    [("unix:///a/b-0", "unix:/a/b-0"), ("/a/b-0", "unix:/a/b-0"), ("tcp://h:1", "h:1"), ("tcp://[::1]:1", "[::1]:1")],
)
def test_targets_of_urls(url, target):
    assert grpc_target(url) == target


@pytest.mark.parametrize("endpoint", ["host", "host:", "host:x", "host:65536", "::1:80", "host:²", "tcp://"])
def test_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(ValueError, match="is not host:port"):
        tcp_url(endpoint)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("unix:///a", True),
        ("tcp://127.0.0.2:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://node0:1", False),
    ],
)
def test_loopback_is_distinguished_from_the_network(url, expected):
    assert is_loopback(url) is expected


def test_examples_in_the_docstrings():
    assert doctest.testmod(address).failed == 0
