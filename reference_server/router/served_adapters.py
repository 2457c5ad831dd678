"""The adapters that requests may name: which are loaded, which requests use them, loading and unloading at run time.

A load at run time gets an id of its own on the wire (`name#1`, then `name#2`), so cached prefixes of an earlier adapter
of that name are never reused. An adapter that is unloaded or replaced takes no new requests; its weights stay until its
last request has ended.
"""

import asyncio
import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from reference_server.adapter_source import AdapterSource, check_name
from reference_server.errors import AdapterNotFoundError, ArgumentError, ShardError, ValidationError
from reference_server.presets.catalog import PREFIX
from reference_server.router.telemetry.metrics import Metrics
from reference_server.transport.shard import Shard, until_loaded

logger = logging.getLogger(__name__)

MAX_LISTED = 16
"""Names in an error message."""


class AdapterShard(Protocol):
    """Loads adapters between two steps. Errors: `ShardError`."""

    async def load_adapter(self, source: AdapterSource) -> int: ...

    async def unload_adapter(self, adapter_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class AdapterRules:
    """directory: that of adapters at run time; None refuses them. falls_back: unknown names select the base model."""

    model_id: str = ""
    directory: Path | None = None
    falls_back: bool = False
    max_adapters: int = 64


class _Loaded:
    """One adapter on the shard. source: its name is the id on the wire."""

    def __init__(self, source: AdapterSource, nbytes: int | None = None) -> None:
        self.source = source
        self.nbytes = nbytes
        self.requests = 0
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    @contextmanager
    def use(self) -> Iterator[str]:
        self.requests += 1
        self.is_idle.clear()
        try:
            yield self.source.name
        finally:
            self.requests -= 1
            if not self.requests:
                self.is_idle.set()


class Adapters:
    """The loaded adapters by name. ids: on the wire, of those that the shard has."""

    def __init__(
        self,
        ids: Iterable[str] = (),
        rules: AdapterRules = AdapterRules(),
        shard: AdapterShard | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.rules = rules
        self._loaded = {each.partition("#")[0]: _Loaded(AdapterSource(each, "")) for each in ids}
        self._shard = shard
        self._metrics = metrics
        self._last_load = max(
            (int("0" + each.source.name.partition("#")[2]) for each in self._loaded.values()), default=0
        )
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._report()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    @contextmanager
    def use(self, name: str | None) -> Iterator[str | None]:
        """The id on the wire of an adapter, which stays loaded inside the block; None for the base model.

        Raises `ValidationError` for an unknown name. A server without adapters passes every name to the shard, as TGI
        does.
        """
        loaded = None if name is None else self._loaded.get(name)
        if loaded is not None and name is not None:
            if self._metrics is not None:
                self._metrics.on_adapter(name)
            with loaded.use() as wire_id:
                yield wire_id
            return
        has_adapters = bool(self._loaded) or self.rules.directory is not None
        if name is None or not has_adapters:
            yield name
            return
        if name != self.rules.model_id and not self.rules.falls_back:
            raise ValidationError(f"no adapter {name!r} is loaded; {self._listed()}")
        yield None

    async def load(self, name: str, location: str, *, replaces: bool = False) -> None:
        """Load an adapter from a directory. Raises `ValidationError`."""
        source = self._checked(name, location)
        async with self._changing:
            earlier = self._loaded.get(name)
            if earlier is not None and not replaces:
                raise ValidationError(
                    f"the adapter {name!r} is loaded already: unload it first, or set `load_inplace` to true"
                )
            if earlier is None and len(self._loaded) >= self.rules.max_adapters:
                raise ValidationError(
                    f"{len(self._loaded)} adapters are loaded, the limit of `--max-adapters`: unload one of them"
                )
            try:
                nbytes = await self._on_shard.load_adapter(source)
            except ShardError as error:
                raise ValidationError(str(error)) from error
            self._loaded[name] = _Loaded(source, nbytes)
            self._report()
        logger.info("loaded the adapter %s from %s as %s", name, source.location, source.name)
        if earlier is not None:
            self._retire_later(earlier)

    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter, wait for the requests that use it, then free it.

        Raises `AdapterNotFoundError`. If the caller disconnects, the adapter is still freed.
        """
        loaded = self._loaded.pop(name, None)
        if loaded is None:
            raise AdapterNotFoundError(f"no adapter {name!r} is loaded; {self._listed()}")
        self._report()
        await asyncio.shield(self._retire_later(loaded))
        logger.info("unloaded the adapter %s", name)

    async def restore(self, shard: Shard) -> None:
        """Load the adapters of run time again, if the shard is a new process. Raises `ShardError`."""
        present = (await shard.info()).adapters
        for name, loaded in list(self._loaded.items()):
            source = loaded.source
            if source.name in present:
                continue
            if source.location:
                await until_loaded(functools.partial(shard.load_adapter, source))
            elif "#" in source.name:
                logger.warning(
                    "the model server restarted without the adapter %s, which an earlier router loaded", name
                )
                del self._loaded[name]

    def _retire_later(self, loaded: _Loaded) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._retire(loaded))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _retire(self, loaded: _Loaded) -> None:
        await loaded.is_idle.wait()
        try:
            await self._on_shard.unload_adapter(loaded.source.name)
        except ShardError as error:
            # A shard that restarted does not have it.
            logger.warning("could not unload %s: %s", loaded.source.name, error)

    def _checked(self, name: str, location: str) -> AdapterSource:
        """The location to load from, under a new id. Raises `ValidationError`."""
        directory = self.rules.directory
        if directory is None or self._shard is None:
            raise ValidationError("adapters are not loaded at run time: start the server with `--adapter-directory`")
        try:
            check_name(name)
        except ArgumentError as error:
            raise ValidationError(str(error)) from None
        if name == self.rules.model_id:
            raise ValidationError(f"the name {name!r} is that of the model: give the adapter another name")
        if not location.startswith(PREFIX):
            root = directory.resolve()
            path = (root / location).resolve() if "\0" not in location else root
            if root not in path.parents or not path.is_dir():
                raise ValidationError(f"`lora_path` {location!r} is not a directory below `--adapter-directory`")
            location = str(path)
        # Ids on the wire are used once. No name has a `#`.
        self._last_load += 1
        return AdapterSource(f"{name}#{self._last_load}", location)

    @property
    def _on_shard(self) -> AdapterShard:
        assert self._shard is not None, "checked before"
        return self._shard

    def _listed(self) -> str:
        if not self._loaded:
            return "none is loaded"
        more = len(self._loaded) - MAX_LISTED
        names = ", ".join([*self._loaded][:MAX_LISTED])
        return f"there are {names}" + (f" and {more} more (/v1/models)" if more > 0 else "")

    def _report(self) -> None:
        if self._metrics is not None:
            sizes = [each.nbytes for each in self._loaded.values() if each.nbytes is not None]
            self._metrics.on_adapters(len(self._loaded), sum(sizes))
