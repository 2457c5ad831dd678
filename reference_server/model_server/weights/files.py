"""Selects a model's weight files by name and index; opens only the index.

Only files at the top level count, without those whose name marks other content.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from reference_server.errors import StartupError
from reference_server.json_files import read_json

SAFETENSORS = ".safetensors"
PICKLED = (".bin", ".pt")
NOT_WEIGHTS = ("arguments", "args", "training")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Other files that serving needs, and code in the repository.
SMALL_FILES = (".json", ".model", ".txt", ".jinja", ".tiktoken")
OWN_CODE = ".py"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL_PREFIXES = ("model", "pytorch_model")
_SHARD = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\..+)")


def weight_names(names: Iterable[str], extension: str) -> list[str]:
    """The weight files among `names`, sorted.

    >>> weight_names(["model.safetensors", "training_args.bin", "onnx/model.safetensors"], ".safetensors")
    ['model.safetensors']
    """
    return sorted(
        name
        for name in names
        if name.endswith(extension) and "/" not in name and not any(word in name for word in NOT_WEIGHTS)
    )


def small_names(names: Iterable[str], with_code: bool) -> list[str]:
    """The files among `names`, other than weights, that serving needs.

    >>> small_names(["config.json", "modeling_own.py", "onnx/config.json", "README.md"], with_code=False)
    ['config.json']
    """
    endings = (*SMALL_FILES, OWN_CODE) if with_code else SMALL_FILES
    return sorted(name for name in names if name.endswith(endings) and "/" not in name)


def missing_shards(names: Iterable[str]) -> list[str]:
    """Missing files of the numbered sets in `names`.

    >>> missing_shards(["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
    ['model-00002-of-00003.safetensors']
    """
    present = set(names)
    sets = {(match[1], match[3], match[4], match[5]) for name in present if (match := _SHARD.fullmatch(name))}
    return sorted(
        missing
        for stem, of, count, ending in sets
        for number in range(1, int(count) + 1)
        if (missing := f"{stem}{number:05d}{of}{count}{ending}") not in present
    )


def converted_name(name: str) -> str:
    """The name of a pickled file after conversion to safetensors. TGI strips the prefix's letters; this, the prefix.

    >>> converted_name("pytorch_model-00001-of-00002.bin"), converted_name("tokenizer_free.pt")
    ('model-00001-of-00002.safetensors', 'tokenizer_free.safetensors')
    """
    return name.removeprefix("pytorch_").rpartition(".")[0] + SAFETENSORS


def is_adapter(names: Iterable[str]) -> bool:
    """Whether these are files of an adapter without a complete model in the same folder.

    >>> is_adapter(["adapter_config.json", "adapter_model.safetensors", "optimizer.pt"])
    True
    >>> is_adapter(["adapter_config.json", "adapter_model.safetensors", "model.safetensors"])
    False
    """
    present = set(names)
    endings = (SAFETENSORS, *PICKLED)
    whole = [name for ending in endings for name in weight_names(present, ending) if name.startswith(_MODEL_PREFIXES)]
    return ADAPTER_CONFIG in present and (not whole or bool(missing_shards(whole)))


def file_names(directory: Path) -> list[str]:
    """Files of a directory; none if it does not exist."""
    return [path.name for path in directory.iterdir() if path.is_file()] if directory.is_dir() else []


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a model. Raises StartupError if there are none."""
    for index_name, single in zip(INDEX_FILES, SINGLE_FILES, strict=True):
        if (directory / index_name).is_file():
            return [directory / name for name in indexed_names(directory / index_name, file_names(directory))]
        if (directory / single).is_file():
            return [directory / single]
    names = file_names(directory)
    for extension in (SAFETENSORS, *PICKLED):
        if found := weight_names(names, extension):
            return [directory / name for name in found]
    raise StartupError(f"no weights found in {directory}: neither {SAFETENSORS} nor {' nor '.join(PICKLED)}")


def pickled_names(directory: Path, names: Iterable[str]) -> list[str]:
    """The pickled weights among `names`: those of the index in `directory`, the single file, or all of one ending."""
    present = list(names)
    index = directory / INDEX_FILES[1]
    if index.is_file():
        return indexed_names(index, present)
    if SINGLE_FILES[1] in present:
        return [SINGLE_FILES[1]]
    return next((found for extension in PICKLED if (found := weight_names(present, extension))), [])


def indexed_names(index: Path, present: Iterable[str]) -> list[str]:
    """The files that an index lists: plain names, all of them in `present`. Raises StartupError."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{index} is no index of weights: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise StartupError(f"{index} names {name!r}, which is not a file in the same folder")
    missing = sorted(set(names).difference(present))
    if missing:
        raise StartupError(f"{index} names files that are not there: {', '.join(missing)}")
    return names
