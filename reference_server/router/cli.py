"""The command `text-generation-router`."""

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from importlib import metadata

import uvloop

from reference_server.configuration.config import RouterConfig
from reference_server.configuration.ignored_variables import ignored_variables
from reference_server.configuration.settings import load, process_environment
from reference_server.errors import ArgumentError, ServerError
from reference_server.observability import LogFormat, set_up_logging
from reference_server.router.openapi import openapi_document
from reference_server.router.start.startup import serve

# `__name__` is `__main__` under `python -m`.
logger = logging.getLogger("reference_server.router.cli")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. Returns 0 after a graceful stop, 1 if the router fails, 2 for a wrong flag.

    `print-schema` prints the OpenAPI document instead, without any connection.
    """
    args = sys.argv[1:] if argv is None else argv
    if list(args) == ["print-schema"]:
        print(json.dumps(openapi_document(metadata.version("tgi-bench")), indent=2))
        return 0
    try:
        environ = process_environment()
        loaded = load(RouterConfig, args, environ)
        set_up_logging(loaded.config.log_level, LogFormat.JSON if loaded.config.json_output else LogFormat.TEXT)
        if (warning := ignored_variables(environ)) is not None:
            logger.warning("%s", warning)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(loaded))
    except ArgumentError as error:
        print(f"Error: Argument validation error: {error}", file=sys.stderr)
        return 1
    except ServerError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
