"""The address that a host name stands for, for the router that listens there and the launcher that checks it."""

import ipaddress
import socket

from reference_server.errors import ArgumentError

ANY = "0.0.0.0"


def listening_address(hostname: str) -> str:
    """The IP address of `hostname`, IPv4 if it has one. Raises `ArgumentError` for a name that does not resolve.

    The name of this machine is every interface, as in TGI: container runtimes put it in `HOSTNAME`.
    """
    try:
        return str(ipaddress.ip_address(hostname))
    except ValueError:
        pass
    if hostname == socket.gethostname():
        return ANY
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ArgumentError(f"`hostname` {hostname} is not an address and does not resolve: {error}") from None
    by_family = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    return by_family.get(socket.AF_INET) or next(iter(by_family.values()))


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach an IP address."""
    return ipaddress.ip_address(address).is_loopback
