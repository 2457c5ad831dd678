"""A model's weight files, read lazily: what there is by name, and each tensor, or a part of one, when it is asked for.

Formats are safetensors, preferred, and PyTorch's pickles, which are read with `weights_only=True` and mapped, not
read, into memory. Several files are named by an index or by being the only weights there are.
"""

import json
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference_server.errors import StartupError
from reference_server.model_server.weights.cut import Cut
from reference_server.model_server.weights.hub import PICKLED, weight_names

MAX_HEADER_BYTES = 100_000_000
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class WeightFile(Protocol):
    """One open file of weights."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What the file holds."""
        ...

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """A tensor, or the part `cut` of it. It may lie in the mapped file: copy it to keep it."""
        ...


class Checkpoint:
    """All weights of a model, by the names in its files."""

    def __init__(self, files: dict[Path, WeightFile]) -> None:
        self._home: dict[str, WeightFile] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path, file in files.items():
            for name, shape in file.shapes.items():
                if name in self._home:
                    raise StartupError(f"weight {name} is in {path.name} and in another file of {path.parent}")
                self._home[name] = file
                self.shapes[name] = shape

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Open the weights in a directory; raises StartupError saying which file is missing or damaged."""
        return cls({path: _open(path) for path in weight_files(directory)})

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """A tensor, or the part `cut` of it, on the CPU. It may lie in the mapped file: copy it to keep it."""
        try:
            return self._home[name].read(name, cut)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise StartupError(f"weight {name} could not be read: {error}") from error


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a model's weights. Raises StartupError when there are none."""
    for index_name, single in zip(INDEX_FILES, SINGLE_FILES, strict=True):
        if (directory / index_name).is_file():
            return _indexed(directory / index_name)
        if (directory / single).is_file():
            return [directory / single]
    names = [path.name for path in directory.iterdir() if path.is_file()]
    for extension in (".safetensors", *PICKLED):
        if found := weight_names(names, extension):
            return [directory / name for name in found]
    raise StartupError(f"no weights found in {directory}: neither .safetensors nor {' nor '.join(PICKLED)}")


def _indexed(index: Path) -> list[Path]:
    """The files that an index names: plain names, all of them there."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{index} is no index of weights: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise StartupError(f"{index} names {name!r}, which is not a file beside it")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise StartupError(f"{index} names files that are not there: {', '.join(missing)}")
    return [index.parent / name for name in names]


def _open(path: Path) -> WeightFile:
    try:
        return PickledFile(path) if path.suffix in PICKLED else SafetensorsFile(path)
    except (SafetensorError, pickle.UnpicklingError, ValueError, RuntimeError, EOFError, OSError) as error:
        raise StartupError(f"{path} is no readable file of weights: {error}") from error


class SafetensorsFile:
    """A safetensors file. Its header is checked here and by the library before anything is read."""

    def __init__(self, path: Path) -> None:
        self.shapes = {name: tuple(entry["shape"]) for name, entry in _header(path).items() if name != "__metadata__"}
        self._file: Any = safe_open(path, framework="pt", device="cpu")

    def read(self, name: str, cut: Cut | None) -> Tensor:
        if cut is not None:
            return cut.take(self._file.get_slice(name))
        whole: Tensor = self._file.get_tensor(name)
        return whole


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"its header would be {size} bytes, and {MAX_HEADER_BYTES} are the most")
        header = json.loads(file.read(size), object_pairs_hook=_without_duplicates)
    if not isinstance(header, dict):
        raise ValueError("its header is no table of tensors")
    return header


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"its header has {next(name for name in names if names.count(name) > 1)!r} twice")
    return table


class PickledFile:
    """A file that `torch.save` wrote. Nothing in it is run: what is more than tensors is refused."""

    def __init__(self, path: Path) -> None:
        # Files older than torch 1.6 are no zip archives and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        nested = state.get("state_dict") if isinstance(state, dict) else None
        tensors = nested if isinstance(nested, dict) else state
        if not isinstance(tensors, dict):
            raise ValueError(f"it holds a {type(tensors).__name__}, not named tensors")
        self._tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, cut: Cut | None) -> Tensor:
        return self._tensors[name] if cut is None else cut.take(self._tensors[name])
