"""Write a GPTQ checkpoint: tensors of a weight, files of at most ten gigabytes, a directory written atomically."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from reference_server.errors import ArgumentError, StartupError
from reference_server.model_server.gptq.round_weight import GPTQSettings
from reference_server.model_server.quantization.int4 import WORD_BITS, GroupedIntegers, pack

MAX_FILE_BYTES = 10_000_000_000
METADATA = {"format": "pt", "quantized": "gptq", "origin": "tgi-bench"}
PARTIAL = ".partial"
CONFIG = "config.json"
# Files to copy: tokenizer, chat template, generation settings, code of the model.
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".py", ".txt")
REPLACED = (CONFIG, "quantize_config.json", "quant_config.json")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory whose files move to `path` at the end, the config last; all are deleted on an error.

    It is inside of `path`, which may be a mount. Raises ArgumentError if `path` is not empty.
    """
    refuse_used(path)
    existed = path.is_dir()
    partial = path / PARTIAL
    moved: list[Path] = []
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in sorted(partial.iterdir(), key=lambda file: file.name == CONFIG):
            moved.append(path / file.name)
            file.replace(moved[-1])
        partial.rmdir()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        # Directories that another process has created here stay.
        for file in moved:
            with suppress(OSError):
                file.unlink()
        with suppress(OSError):
            if not existed:
                path.rmdir()
        raise


def refuse_used(path: Path) -> None:
    """Raise ArgumentError for a path that cannot become a new checkpoint."""
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"OUTPUT_DIR {path} is a file: use a new directory")
    if path.is_dir() and any(path.iterdir()):
        raise ArgumentError(f"OUTPUT_DIR {path} is not empty: use a new directory")


class WeightWriter:
    """Writes weights to safetensors files; `finish` names the files and writes an index for several."""

    def __init__(self, directory: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._directory = directory
        self._max_file_bytes = max_file_bytes
        self._buffered: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. The caller must not change it afterwards."""
        if (
            self._buffered
            and sum(each.nbytes for each in self._buffered.values()) + tensor.nbytes > self._max_file_bytes
        ):
            self._write()
        self._buffered[name] = tensor.contiguous()
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the buffered tensors and name the files."""
        self._write()
        count = len(self._written)
        if count == 1:
            self._path(0).rename(self._directory / "model.safetensors")
            return
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names):
            self._path(number).rename(self._directory / name)
        weight_map = {name: file for file, tensors in zip(names, self._written, strict=True) for name in tensors}
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.part"

    def _write(self) -> None:
        path = self._path(len(self._written))
        save_file(self._buffered, path, metadata=METADATA)
        # The library sets mode 0600.
        path.chmod(0o644)
        self._written.append(list(self._buffered))
        self._buffered = {}


def fits(shape: tuple[int, int], bits: int) -> bool:
    """Whether a weight of outputs x inputs fills whole words in both dimensions, as the format requires."""
    return all(size * bits % WORD_BITS == 0 for size in shape)


def gptq_tensors(weight: GroupedIntegers) -> dict[str, Tensor]:
    """The tensors of a weight in GPTQ's first format, which stores `zero - 1`.

    qweight: int32 [inputs * bits / 32, outputs]; qzeros: int32 [groups, outputs * bits / 32];
    scales: float16 [groups, outputs]; g_idx: int32 [inputs].
    """
    return {
        "qweight": pack(weight.codes.t(), weight.bits, 0),
        "qzeros": pack(weight.zeros.t().long() - 1, weight.bits, 1),
        "scales": weight.scales.t().half().contiguous(),
        "g_idx": weight.group_of.int(),
    }


def as_float16(name: str, tensor: Tensor) -> Tensor:
    """Convert a plain weight to float16, as readers expect. Raises StartupError if it exceeds the float16 range."""
    if not tensor.is_floating_point():
        return tensor.clone()
    narrow = tensor.to(torch.float16)
    if bool(narrow.isinf().any()) and not bool(tensor.isinf().any()):
        largest = tensor.abs().max().item()
        raise StartupError(
            f"weight {name} has a value of {largest:g}, but float16 in GPTQ checkpoints holds at most 65504"
        )
    return narrow.clone() if narrow is tensor else narrow


def write_config(
    directory: Path,
    config: Mapping[str, Any],
    settings: GPTQSettings,
    block_name: str,
    linears_in_block: list[str] | None,
) -> None:
    """`config.json` and, for older tools, `quantize_config.json`.

    block_name: of the list of blocks. linears_in_block: the quantized linears of a block, None: all.
    """
    quantization: dict[str, Any] = {
        "quant_method": "gptq", "bits": settings.bits, "group_size": settings.group_size,
        "damp_percent": settings.damping, "desc_act": settings.act_order, "static_groups": settings.static_groups,
        "sym": settings.symmetric, "true_sequential": False, "checkpoint_format": "gptq",
        "block_name_to_quantize": block_name,
    }  # fmt: skip
    if linears_in_block is not None:
        quantization["modules_in_block_to_quantize"] = [linears_in_block]
    dtype = "torch_dtype" if "torch_dtype" in config else "dtype"
    written = {**config, dtype: "float16", "quantization_config": quantization}
    (directory / CONFIG).write_text(json.dumps(written, indent=2) + "\n")
    (directory / "quantize_config.json").write_text(json.dumps(quantization, indent=2) + "\n")


def copy_beside(source: Path, directory: Path) -> None:
    """Copy the other files from the folder of a model's weights."""
    for path in source.iterdir():
        is_copied = path.suffix in COPIED_SUFFIXES and path.name not in REPLACED
        if path.is_file() and is_copied and not path.name.endswith(".index.json"):
            shutil.copyfile(path, directory / path.name)
