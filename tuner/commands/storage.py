"""`tgi-tune storage`: runs a gRPC proxy of a database for workers on several machines."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from loadgen.errors import UsageError
from loadgen.program import Command
from loadgen.redaction import redacted_text

PROXIED = ("sqlite:", "postgresql://", "mysql://")
HOST, PORT = "127.0.0.1", 13000


def add_storage_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("storage", metavar="URL", help="Database to serve: sqlite:PATH, postgresql://… or mysql://….")
    parser.add_argument(
        "--host",
        default=HOST,
        help=f"Address to listen on. Default {HOST}. Workers need the printed token. The traffic is not encrypted.",
    )
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"Port to listen on. Default {PORT}.")
    parser.add_argument("--json", action="store_true", help="Print the address as JSON.")


def serve_database(args: argparse.Namespace, _words: Sequence[str]) -> int:
    """Serve a database until the process is terminated. The token is random unless the environment has one.

    Raises UsageError, StudyError, StorageLostError.
    """
    if not args.storage.startswith(PROXIED):
        raise UsageError(
            f"the storage {redacted_text(args.storage)!r} cannot be served: use one of {', '.join(PROXIED)}; "
            "share a journal as a file"
        )
    from tuner.study.shared_storage.storage import open_storage
    from tuner.study.shared_storage.storage_proxy import serve_storage
    from tuner.study.shared_storage.token import TOKEN_VARIABLE, new_token, token_of_environment

    backing = open_storage(args.storage, Path())
    address = f"grpc://{args.host}:{args.port}"
    database = redacted_text(args.storage)
    given = token_of_environment()
    token = given or new_token()
    # The token of the environment is not printed.
    printed = {} if given else {TOKEN_VARIABLE: token}
    text = (
        json.dumps({"storage": address, "kept": database, **printed})
        if args.json
        else f"serving {database}: {''.join(f'{name}={each} ' for name, each in printed.items())}--storage {address}"
    )
    serve_storage(backing, args.host, args.port, token, lambda: print(text, flush=True))
    return 0


EXAMPLES = ("sqlite:studies.db", "sqlite:studies.db --host 10.0.0.1", "postgresql://tuner@db/studies --port 13001")
COMMAND = Command("Serve a database to workers on other machines.", add_storage_flags, serve_database, EXAMPLES)
