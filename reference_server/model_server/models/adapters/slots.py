"""The adapters of one model in memory: each has a slot, which a step's tokens name."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_server import model_files
from reference_server.adapter_source import AdapterSource
from reference_server.errors import ArgumentError, StartupError, UnsupportedError
from reference_server.json_files import read_json
from reference_server.model_server.adapter_rows import BASE
from reference_server.model_server.models.adapters.site import Site, Sites
from reference_server.model_server.weights.adapter import Adapter, find_file
from reference_server.presets import catalog

logger = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """`count`: of loaded adapters. `bytes`: of their factors on all ranks; None has no limit."""

    count: int
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    slot: int
    nbytes: int
    source: AdapterSource


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read and fits the model. factors: of each site, as the product stores them."""

    directory: Path
    rank: int
    nbytes: int
    factors: tuple[Any, ...]


class AdapterSlots:
    """The loaded adapters by id. A slot is used again once its adapter is unloaded and no sequence uses it."""

    def __init__(
        self,
        sites: Sites,
        model: object,
        base_config: Path | None,
        limits: AdapterLimits,
        own_name: Callable[[str], str] = str,
    ) -> None:
        """own_name: the name in the model of a module that an adapter changes."""
        self._sites: Sequence[Site] = sites.all
        self._linears = sites.linears
        self._class_name = type(model).__name__
        self._base_config = base_config
        self._limits = limits
        self._own_name = own_name
        self._loaded: dict[str, LoadedAdapter] = {}
        self._retired: dict[int, LoadedAdapter] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors in memory, those of unloaded adapters that sequences still use included."""
        # Copies, because a reading thread calls this too.
        return sum(each.nbytes for each in (*list(self._loaded.values()), *list(self._retired.values())))

    def find(self, adapter_id: str | None) -> int:
        """The slot of an adapter. An unknown id selects the base model, as the protocol defines."""
        loaded = None if adapter_id is None else self._loaded.get(adapter_id)
        return BASE if loaded is None else loaded.slot

    def nbytes_from(self, source: AdapterSource) -> int | None:
        """Bytes of the adapter that was loaded from this directory under this name; None without one."""
        loaded = self._loaded.get(source.name)
        return loaded.nbytes if loaded is not None and loaded.source == source else None

    def load(self, source: AdapterSource, directory: Path) -> int:
        """Read and install an adapter; returns its bytes. Errors as of `check_count`, `read` and `install`."""
        self.check_count(source.name)
        return self.install(source, self.read(source, directory))

    def check_count(self, adapter_id: str) -> None:
        """Raise ArgumentError if the number of loaded adapters has reached its limit."""
        if adapter_id not in self._loaded and len(self._loaded) >= self._limits.count:
            raise ArgumentError(
                f"{len(self._loaded)} adapters are loaded, the limit of `--max-adapters`: unload one of them"
            )

    def read(self, source: AdapterSource, directory: Path) -> ReadAdapter:
        """Read and check an adapter's files, in any thread.

        Raises ArgumentError over a limit, StartupError for wrong files, UnsupportedError for an unsupported adapter.
        """
        self._check_bytes(source.name, find_file(directory).stat().st_size)
        adapter = Adapter.open(directory).renamed(self._own_name)
        self._check_base(adapter, directory)
        self._check_shapes(adapter, directory)
        factors = [site.factors_of(adapter) for site in self._sites]
        nbytes = sum(each.nbytes for each in factors if each is not None)
        self._check_bytes(source.name, nbytes)
        stored = (None if each is None else site.stored(each) for site, each in zip(self._sites, factors, strict=True))
        return ReadAdapter(directory, adapter.rank, nbytes, tuple(stored))

    def install(self, source: AdapterSource, read: ReadAdapter) -> int:
        """Serve an adapter; returns its bytes. It replaces a loaded one of the same id. Raises ArgumentError."""
        self.check_count(source.name)
        self._check_bytes(source.name, read.nbytes)
        slot = self._free_slot()
        for site, each in zip(self._sites, read.factors, strict=True):
            site.put(slot, each)
        if (earlier := self._loaded.get(source.name)) is not None:
            self._retired[earlier.slot] = earlier
        self._loaded[source.name] = LoadedAdapter(slot, read.nbytes, source)
        logger.info(
            "loaded the adapter %s: rank %d, %.1f MiB, from %s",
            *(source.name, read.rank, read.nbytes / MIB, read.directory),
        )
        return read.nbytes

    def unload(self, adapter_id: str, used: Collection[int]) -> None:
        """Forget an adapter; its factors stay until `sweep` finds that no sequence uses them. Raises ArgumentError."""
        if adapter_id not in self._loaded:
            raise ArgumentError(f"no adapter {adapter_id!r} is loaded")
        loaded = self._loaded.pop(adapter_id)
        self._retired[loaded.slot] = loaded
        self.sweep(used)

    def sweep(self, used: Collection[int]) -> None:
        """Free the factors of unloaded adapters. used: the slots of all sequences."""
        for slot in [slot for slot in self._retired if slot not in used]:
            for site in self._sites:
                site.put(slot, None)
            del self._retired[slot]

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def _free_slot(self) -> int:
        taken = {each.slot for each in self._loaded.values()}.union(self._retired)
        return next(slot for slot in range(1, len(taken) + 2) if slot not in taken)

    def _check_bytes(self, adapter_id: str, added: int) -> None:
        limit = self._limits.bytes
        if limit is not None and self.nbytes + added > limit:
            raise ArgumentError(
                f"the adapter {adapter_id!r} takes {added / MIB:.1f} MiB and {self.nbytes / MIB:.1f} MiB are loaded, "
                f"but adapters may take {limit / MIB:.1f} MiB: unload one of them, or raise `--adapter-memory-mib`"
            )

    def _check_shapes(self, adapter: Adapter, directory: Path) -> None:
        for name, factors in adapter.factors.items():
            linear = self._linears.get(name)
            if linear is None:
                raise UnsupportedError(
                    f"{directory}: the adapter changes {name}, which is not a linear layer of {self._class_name}; its "
                    f"linear layers are {', '.join(_kinds(self._linears))}"
                )
            found = (factors.b.shape[0], factors.a.shape[1])
            if found != (linear.outputs, linear.inputs):
                raise StartupError(
                    f"{directory}: the adapter's {name} is for a weight of shape {found}, but the model's weight has "
                    f"shape {(linear.outputs, linear.inputs)}"
                )

    def _check_base(self, adapter: Adapter, directory: Path) -> None:
        """Refuse an adapter of another architecture, where the config of its base is on this machine."""
        if self._base_config is None:
            return
        expected = read_json(self._base_config).get("architectures")
        base = _local_config(adapter.base_model_id)
        if base is None or base.resolve() == self._base_config.resolve():
            return
        found = read_json(base).get("architectures")
        if found != expected:
            raise UnsupportedError(
                f"{directory}: its base model {adapter.base_model_id} is {found}, and the model served is {expected}"
            )
        logger.warning("%s was trained on %s, not on the model served", directory, adapter.base_model_id)


def locate(source: AdapterSource, cache: Path | None) -> Path:
    """The directory of an adapter's files. Raises StartupError."""
    preset = catalog.find_adapter(source.location)
    if preset is not None:
        return preset
    patterns = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"]
    try:
        return model_files.locate(source.location, source.revision, cache, patterns).directory
    except StartupError as error:
        raise StartupError(f"`--lora-adapters` {source.name}: {error}") from error


def _local_config(model_id: str) -> Path | None:
    try:
        found = model_files.locate_local(model_id)
    except (StartupError, UnsupportedError):
        return None
    config = None if found is None else found.directory / "config.json"
    return config if config is not None and config.is_file() else None


def _kinds(linears: Collection[str]) -> list[str]:
    """The last names, once each: q_proj, k_proj, ...

    >>> _kinds(["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"])
    ['up_proj', 'q_proj']
    """
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
