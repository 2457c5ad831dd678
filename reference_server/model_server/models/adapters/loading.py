"""Loads adapters while sequences run: files are read in a thread of their own, and installed between two steps.

`load` is called repeatedly until the files are read, so that steps run between the calls.
"""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path

import torch

from reference_server.adapter_source import AdapterSource
from reference_server.errors import ArgumentError, ShardError, StartupError
from reference_server.model_server.device import first_line
from reference_server.model_server.models.adapters.slots import AdapterSlots, ReadAdapter, locate


class AdapterLoads:
    """The loads in progress of one model. enter_thread: called first in a thread that reads.

    adapters: None for a model that serves none.
    """

    def __init__(self, adapters: AdapterSlots | None, cache: Path | None, enter_thread: Callable[[], object]) -> None:
        self._adapters = adapters
        self._cache = cache
        self._enter_thread = enter_thread
        self._readings: dict[str, tuple[AdapterSource, Future[ReadAdapter]]] = {}

    def load(self, source: AdapterSource) -> int | None:
        """Start or continue to load an adapter; returns its bytes once it is loaded, None while its files are read.

        Raises ShardError with the reason if it is not served.
        """
        if self._adapters is None:
            raise ShardError("the model server has no memory for adapters: start it with `--adapter-directory`")
        if (nbytes := self._adapters.nbytes_from(source)) is not None:
            return nbytes
        begun = self._readings.get(source.name)
        try:
            if begun is None or begun[0] != source:
                self._adapters.check_count(source.name)
                self._readings[source.name] = source, self._begin(self._adapters, source)
                return None
            if not begun[1].done():
                return None
            del self._readings[source.name]
            return self._adapters.install(source, begun[1].result())
        except (StartupError, OSError, RuntimeError) as error:
            # A RuntimeError would end the shard, but this one concerns only the adapter's tensors.
            raise ShardError(first_line(error)) from error

    def unload(self, adapter_id: str, used: Collection[int]) -> None:
        """Forget an adapter, or its load. used: the slots of the sequences that run. Raises ShardError without one."""
        begun = self._readings.pop(adapter_id, None)
        if begun is not None and (self._adapters is None or adapter_id not in self._adapters.names):
            return
        try:
            if self._adapters is None:
                raise ArgumentError(f"no adapter {adapter_id!r} is loaded")
            self._adapters.unload(adapter_id, used)
        except StartupError as error:
            raise ShardError(str(error)) from error

    def _begin(self, adapters: AdapterSlots, source: AdapterSource) -> "Future[ReadAdapter]":
        reading: Future[ReadAdapter] = Future()

        def read() -> None:
            try:
                self._enter_thread()
                with torch.no_grad():
                    reading.set_result(adapters.read(source, locate(source, self._cache)))
            except BaseException as error:
                reading.set_exception(error)

        # A file that never ends must not keep the process from ending.
        threading.Thread(target=read, name=f"reads {source.name}", daemon=True).start()
        return reading
