"""Converts pickled weights to safetensors, in the folder of the source files.

A tensor with several names is stored once, and the file's metadata maps the other names to it: `dropped -> kept`. The
written file is compared with the source, bit for bit, before it is renamed to its final name.
"""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from reference_server.errors import StartupError
from reference_server.model_server.weights.checkpoint import PickledFile, SafetensorsFile, open_weights
from reference_server.model_server.weights.files import INDEX_FILES, converted_name

logger = logging.getLogger(__name__)


def convert(directory: Path, pickled: Sequence[str]) -> None:
    """Convert the `pickled` files of `directory` that are not converted yet; write an index if there are several."""
    if len({converted_name(name) for name in pickled}) < len(pickled):
        raise StartupError(
            f"{', '.join(pickled)} of {directory} would get the same name: remove those that are not meant"
        )
    for number, name in enumerate(pickled, start=1):
        target = directory / converted_name(name)
        if target.is_file():
            continue
        started = time.monotonic()
        convert_file(directory / name, target)
        logger.info("Convert: [%d/%d] -- Took: %.1f s", number, len(pickled), time.monotonic() - started)
    if len(pickled) > 1:
        _write_index(directory, [converted_name(name) for name in pickled])


def convert_file(source: Path, target: Path) -> None:
    """Write the tensors of `source` to `target`, which appears once it is complete. Raises StartupError."""
    file = open_weights(source)
    assert isinstance(file, PickledFile)
    tensors = {name: file.read(name, None) for name in file.shapes}
    _check_tensors(source, tensors)
    groups = same_tensors(tensors)
    # Importing Transformers takes seconds, and most files share no tensors.
    aliases = dropped_names(groups, tied_names(source.parent)) if any(len(group) > 1 for group in groups) else {}
    kept = {name: _own(tensor) for name, tensor in tensors.items() if name not in aliases}
    new = target.with_name(f".{target.name}.converting")
    try:
        _check_space(target.parent, sum(tensor.nbytes for tensor in kept.values()))
        save_file(kept, new, metadata={"format": "pt"} | aliases)
        _compare(new, tensors)
        # safetensors creates files with mode 0600.
        shutil.copymode(source, new)
        new.replace(target)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"{source} cannot be converted to {target}: {error}") from error
    finally:
        new.unlink(missing_ok=True)


def same_tensors(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names grouped by tensor. Raises StartupError naming tensors that overlap partly."""
    views: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in sorted(tensors.items()):
        # Empty tensors share nothing.
        view = (_storage(tensor), tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        views.setdefault(view if tensor.numel() else (name,), []).append(name)
    _refuse_overlap({names[0]: tensors[names[0]] for names in views.values()})
    return list(views.values())


def dropped_names(groups: Sequence[Sequence[str]], tied: Collection[str]) -> dict[str, str]:
    """Dropped name -> kept name. A group keeps its first name that no pattern of `tied` matches.

    >>> dropped_names([["head.weight", "tokens.weight"], ["norm.weight"]], tied=["head.weight"])
    {'head.weight': 'tokens.weight'}
    """
    ordered = [sorted(group, key=lambda name: (_matches(name, tied), name)) for group in groups]
    return {dropped: kept for kept, *rest in ordered for dropped in rest}


def tied_names(directory: Path) -> frozenset[str]:
    """Patterns of the names that the model's class ties; empty if the class is unknown."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
        import transformers

        tied = getattr(transformers, config["architectures"][0])._tied_weights_keys
        # A list before Transformers 5, a dict since.
        return frozenset(tied or ())
    except Exception as error:
        logger.info("Unknown model class in %s, so its tied weights are unknown: %s", directory, error)
        return frozenset()


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_tensors(source: Path, tensors: Mapping[str, Tensor]) -> None:
    if not tensors:
        raise StartupError(f"{source} holds no tensors")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise StartupError(f"{source}: {name} is no plain tensor, and safetensors holds no others")
        # A stride of 0 makes any number of elements of a few bytes.
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise StartupError(f"{source}: {name} would be {tensor.nbytes} bytes and is stored in fewer")


def _refuse_overlap(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that overlap partly, so that the output is never larger than the input."""
    ends: dict[int, tuple[int, str]] = {}
    filled = [(name, tensor) for name, tensor in tensors.items() if tensor.numel()]
    for name, tensor in sorted(filled, key=lambda item: (_storage(item[1]), item[1].data_ptr())):
        storage, start = _storage(tensor), tensor.data_ptr()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end, before = ends.get(storage, (start, ""))
        if start < end:
            raise StartupError(
                f"{before} and {name} overlap and are not the same, so there is no suitable name for what they share:"
                " save the model as safetensors"
            )
        ends[storage] = (start + span * tensor.element_size(), name)


def _own(tensor: Tensor) -> Tensor:
    """The tensor in its own storage, as safetensors requires."""
    whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise StartupError(f"{needed} bytes are to be converted, and {directory} has {free} bytes free")


def _compare(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compare the written tensors, dropped names included."""
    written = SafetensorsFile(path)
    for name, tensor in tensors.items():
        if not torch.equal(_bits(written.read(name, None)), _bits(tensor)):
            raise StartupError(f"{name} is not in {path} what it was before the conversion")


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: as numbers, NaNs would differ and signed zeros would not."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _write_index(directory: Path, names: Sequence[str]) -> None:
    shapes = {name: SafetensorsFile(directory / name).shapes for name in names}
    index = {
        "metadata": {"total_size": sum((directory / name).stat().st_size for name in names)},
        "weight_map": {weight: name for name in names for weight in shapes[name]},
    }
    path = directory / INDEX_FILES[0]
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(index, indent=2, sort_keys=True))
    new.replace(path)
