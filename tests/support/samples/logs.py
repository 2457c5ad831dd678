"""Keeps what a test does to the process's logging from the tests after it."""

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
