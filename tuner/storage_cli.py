"""`tgi-tune storage`: one database behind a proxy, so that workers of several machines need only its address."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from loadgen.errors import UsageError

PROXIED = ("sqlite:", "postgresql://", "mysql://")
HOST, PORT = "127.0.0.1", 13000


def add_storage_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("storage", metavar="URL", help="sqlite:PATH, postgresql://… or mysql://….")
    parser.add_argument(
        "--host",
        default=HOST,
        help=f"Address to listen on. Default {HOST}. Who reaches it may change every study: there is no password.",
    )
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"Default {PORT}.")
    parser.add_argument("--json", action="store_true", help="Print the address as JSON.")


def storage(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    """Serve a database until a signal comes. Raises UsageError, StudyError, StorageLostError."""
    if not given.storage.startswith(PROXIED):
        raise UsageError(
            f"the storage {given.storage!r} cannot be served: give one of {', '.join(PROXIED)}; "
            "a journal is shared as a file"
        )
    from tuner.storage import open_storage, redacted, serve_storage

    backing = open_storage(given.storage, Path())
    address = f"grpc://{given.host}:{given.port}"
    kept = redacted(given.storage)
    text = json.dumps({"storage": address, "kept": kept}) if given.json else f"serving {kept}: --storage {address}"
    serve_storage(backing, given.host, given.port, lambda: print(text, flush=True))
    return 0
