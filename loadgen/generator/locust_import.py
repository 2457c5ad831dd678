"""Imports locust, which makes the sockets of everything imported later cooperative.

While it patches, gevent reads the metadata of every installed package 26 times in search of plug-ins. Here it reads
them once: a worker starts a sixth sooner. When a load ends, locust searches the source of every imported module for
the name of the caller, for a debug message. Here it finds none: a worker ends 0.1 s sooner.
"""

from importlib import metadata
from types import SimpleNamespace

search = metadata.entry_points
metadata.entry_points = search().select
try:
    import locust
    import locust.runners
finally:
    metadata.entry_points = search

# Its only use of the module; without `stack` it logs that the caller is unknown.
locust.runners.inspect = SimpleNamespace()

__all__ = ["locust"]
