"""Undoes the changes of a test to the logging of the process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_logging() -> Iterator[None]:
    """Puts handlers and levels back."""
    loggers = [logging.getLogger(), logging.getLogger("reference_server")]
    kept = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    try:
        yield
    finally:
        for logger, handlers, level in kept:
            logger.handlers[:] = handlers
            logger.setLevel(level)
        logging.captureWarnings(False)
