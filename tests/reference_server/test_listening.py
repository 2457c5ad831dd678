import socket

import pytest

from reference_server.errors import ArgumentError
from reference_server.listening import is_loopback, listening_address

ADDRESSES = {
    "localhost": [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))],
    "six": [(socket.AF_INET6, ("::2", 0, 0, 0))],
}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of this test alone; the machine is called `a-container`."""

    def find(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name not in ADDRESSES:
            raise socket.gaierror(-2, "Name or service not known")
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in ADDRESSES[name]]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    monkeypatch.setattr(socket, "gethostname", lambda: "a-container")


@pytest.mark.parametrize(
    ("hostname", "address"),
    [
        ("127.0.0.3", "127.0.0.3"),
        ("::", "::"),
        ("localhost", "127.0.0.1"),
        ("six", "::2"),
        ("a-container", "0.0.0.0"),
    ],
)
def test_hardening_R12_a_host_name_is_resolved(hostname: str, address: str):
    assert listening_address(hostname) == address


def test_hardening_R12_a_name_that_does_not_resolve_is_refused():
    with pytest.raises(ArgumentError, match="`hostname` nowhere is not an address and does not resolve"):
        listening_address("nowhere")


def test_only_this_machine_reaches_a_loopback_address():
    assert [is_loopback(address) for address in ("127.0.0.1", "::1", "0.0.0.0", "192.0.2.1")] == [
        True,
        True,
        False,
        False,
    ]
