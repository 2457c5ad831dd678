"""A model's weight files, read lazily: what there is by name, and each tensor, or a part of one, when it is asked for.

Formats are safetensors, preferred, and PyTorch's pickles, which are read with `weights_only=True` and mapped, not
read, into memory. Several files are named by an index or by being the only weights there are.
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
        return cls({path: open_weights(path) for path in weight_files(directory)})

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """A tensor, or the part `cut` of it, on the CPU. It may lie in the mapped file: copy it to keep it."""
        try:
            return self._home[name].read(name, cut)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise StartupError(f"weight {name} could not be read: {error}") from error


def open_weights(path: Path) -> WeightFile:
    """Open one file. Raises StartupError when it is damaged, or a pickle that holds more than tensors."""
    try:
        return PickledFile(path) if path.suffix in PICKLED else SafetensorsFile(path)
    except pickle.UnpicklingError as error:
        # What torch says goes on with how to run it all the same.
        wanted = _UNSAFE.search(str(error))
        what = f"it asks for {wanted[1]}" if wanted else "it is damaged, or holds more than tensors"
        raise StartupError(f"{path} is unsafe and was not read: {what}") from error
    except Exception as error:
        # A damaged pickle can end in any error there is.
        raise StartupError(f"{path} is no readable file of weights: {error}") from error


class SafetensorsFile:
    """A safetensors file. Its header is checked here and by the library before anything is read."""

    def __init__(self, path: Path) -> None:
        header = _header(path)
        self._file: Any = safe_open(path, framework="pt", device="cpu")
        metadata: dict[str, str] = self._file.metadata() or {}  # type: ignore[no-untyped-call]
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        # A tensor that several names shared is there once, and the metadata tells where the others find it.
        self._kept = {name: kept for name, kept in metadata.items() if name not in shapes and kept in shapes}
        self.shapes = shapes | {name: shapes[kept] for name, kept in self._kept.items()}

    def read(self, name: str, cut: Cut | None) -> Tensor:
        own = self._kept.get(name, name)
        if cut is not None:
            return cut.take(self._file.get_slice(own))
        whole: Tensor = self._file.get_tensor(own)
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
