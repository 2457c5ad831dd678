import socket
import stat
from pathlib import Path

import pytest

from reference_server.errors import ArgumentError
from reference_server.launcher.sockets import check_port, check_socket, private_directory


def test_the_private_directory_is_ours_alone_and_goes_away() -> None:
    with private_directory() as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (directory / "shard-0").write_text("")

    assert not directory.exists()


def test_a_long_temporary_directory_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    with private_directory() as directory:
        check_socket(directory / "shard-63")


def test_a_free_port_and_a_host_name_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a-container")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    check_port("127.0.0.1", port)
    check_port("a-container", port)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        with pytest.raises(ArgumentError, match=f"port {port} is already in use"):
            check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"cannot listen on 192\.0\.2\.1"):
        check_port("192.0.2.1", 0)


def test_a_stale_socket_of_ours_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s-0"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))

    check_socket(path)

    assert not path.exists()


def test_reliability_F27_a_socket_that_is_served_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s-0"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        with pytest.raises(ArgumentError, match="in use by a running server"):
            check_socket(path)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s-0"
    path.write_text("precious")

    with pytest.raises(ArgumentError, match="not a socket of this user"):
        check_socket(path)

    assert path.read_text() == "precious"


def test_reliability_F27_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="longer than 107 bytes"):
        check_socket(tmp_path / ("x" * 120))


def test_reliability_T60_a_directory_that_others_can_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)

    with pytest.raises(ArgumentError, match="is writable by other users"):
        check_socket(tmp_path / "s-0")


def test_a_shared_directory_with_the_sticky_bit_is_fine(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)

    check_socket(tmp_path / "s-0")


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="No such file"):
        check_socket(tmp_path / "nowhere" / "s-0")
