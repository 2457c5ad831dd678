"""Addresses of shards, a unix socket or a TCP endpoint, as urls of ServiceDiscovery and as gRPC targets."""

from ipaddress import ip_address

UNIX = "unix://"
TCP = "tcp://"
LOOPBACK = "127.0.0.1"


def unix_url(path: str) -> str:
    return f"{UNIX}{path}"


def tcp_url(endpoint: str) -> str:
    """The url of `host:port`; a missing host is the loopback one. Raises ValueError on anything else.

    >>> tcp_url(":8001"), tcp_url("8001"), tcp_url("[::1]:8001")
    ('tcp://127.0.0.1:8001', 'tcp://127.0.0.1:8001', 'tcp://[::1]:8001')
    """
    host, _, port = endpoint.removeprefix(TCP).rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{endpoint!r} is not host:port")
    return f"{TCP}{host or LOOPBACK}:{int(port)}"


def is_tcp(url: str) -> bool:
    return url.startswith(TCP)


def grpc_target(url: str) -> str:
    """The gRPC target of a url; one without a scheme is a socket path."""
    return url.removeprefix(TCP) if is_tcp(url) else f"unix:{socket_path(url)}"


def socket_path(url: str) -> str:
    return url.removeprefix(UNIX)


def is_loopback(url: str) -> bool:
    """Whether only this machine can reach `url`."""
    if not is_tcp(url):
        return True
    host = url.removeprefix(TCP).rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
