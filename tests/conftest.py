"""Isolates the suite from the environment it is started in, before anything reads that environment."""

from tests.support import environment

environment.isolate()
