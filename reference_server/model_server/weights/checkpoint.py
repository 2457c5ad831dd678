"""A model's weight files, read lazily: shapes by name, and tensors or parts of them on demand.

The formats are safetensors, preferred, and PyTorch's pickles, memory-mapped and read with `weights_only=True`.
"""

import json
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference_server.errors import StartupError
from reference_server.model_server.weights.cut import Cut
from reference_server.model_server.weights.files import PICKLED, weight_files

MAX_HEADER_BYTES = 100_000_000
_UNSAFE = re.compile(r"GLOBAL (\S+)")


class WeightFile(Protocol):
    """One open file of weights."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        ...

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """A tensor, or the part `cut` of it. It may share memory with the file: copy it to keep it."""
        ...


class Checkpoint:
    """All weights of a model, by the names in its files."""

    def __init__(self, files: dict[Path, WeightFile]) -> None:
        self._home: dict[str, Path] = {}
        self._files = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path, file in files.items():
            for name, shape in file.shapes.items():
                if name in self._home:
                    raise StartupError(
                        f"weight {name} is in {self._home[name].name} and in {path.name} of {path.parent}"
                    )
                self._home[name] = path
                self.shapes[name] = shape

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Open the weights in a directory. Raises StartupError naming a missing or damaged file."""
        return cls({path: open_weights(path) for path in weight_files(directory)})

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """A tensor, or the part `cut` of it, on the CPU. It may share memory with the file: copy it to keep it."""
        try:
            return self._files[self._home[name]].read(name, cut)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise StartupError(f"weight {name} could not be read: {error}") from error


def open_weights(path: Path) -> WeightFile:
    """Open a file. Raises StartupError if it is damaged, or a pickle of more than tensors."""
    try:
        return PickledFile(path) if path.suffix in PICKLED else SafetensorsFile(path)
    except pickle.UnpicklingError as error:
        # torch's message also explains how to load the file anyway.
        wanted = _UNSAFE.search(str(error))
        what = f"it refers to {wanted[1]}" if wanted else "it is damaged, or holds more than tensors"
        raise StartupError(f"{path} is unsafe and was not read: {what}") from error
    except Exception as error:
        # A damaged pickle can raise any error.
        raise StartupError(f"{path} is no readable file of weights: {error}") from error


class SafetensorsFile:
    """A safetensors file. Its header is checked here and by the library before anything is read."""

    def __init__(self, path: Path) -> None:
        header = _header(path)
        self._file: Any = safe_open(path, framework="pt", device="cpu")
        metadata: dict[str, str] = self._file.metadata() or {}  # type: ignore[no-untyped-call]
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        # A tensor with several names is stored once; the metadata maps the other names to the stored one.
        self._stored = {name: stored for name, stored in metadata.items() if name not in shapes and stored in shapes}
        self.shapes = shapes | {name: shapes[stored] for name, stored in self._stored.items()}

    def read(self, name: str, cut: Cut | None) -> Tensor:
        stored = self._stored.get(name, name)
        if cut is not None:
            return cut.take(self._file.get_slice(stored))
        whole: Tensor = self._file.get_tensor(stored)
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
    """A file of `torch.save`. Its code is not run: anything but tensors is refused."""

    def __init__(self, path: Path) -> None:
        # Files from before torch 1.6 are not zip archives and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        nested = state.get("state_dict") if isinstance(state, dict) else None
        tensors = nested if isinstance(nested, dict) else state
        if not isinstance(tensors, dict):
            raise ValueError(f"it holds a {type(tensors).__name__}, not named tensors")
        self._tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, cut: Cut | None) -> Tensor:
        return self._tensors[name] if cut is None else cut.take(self._tensors[name])
