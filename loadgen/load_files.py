"""The files that a load is read from, on their way to a worker that cannot read them where they are."""

from pathlib import Path
from typing import Any

from loadgen.config import BenchConfig
from loadgen.datasets.lengths import EMPIRICAL

PATHS = ("prompts_file", "trace_file", "length_pairs")
LENGTHS = ("input_tokens", "output_tokens", "turns")


def pack(config: BenchConfig) -> dict[str, tuple[str, str, bytes]]:
    """By setting: what stands before the path in its value, the file's name, its content."""
    packed = {}
    for name in (*PATHS, *LENGTHS):
        value = getattr(config, name)
        before = f"{EMPIRICAL}:" if name in LENGTHS else ""
        if value is not None and value.startswith(before):
            path = Path(value.removeprefix(before))
            packed[name] = (before, path.name, path.read_bytes())
    return packed


def unpack(packed: dict[str, Any], directory: Path) -> dict[str, str]:
    """Write the files; returns the settings as they read with the new paths."""
    settings = {}
    for name, (before, file_name, content) in packed.items():
        path = directory / name / Path(file_name).name
        path.parent.mkdir(mode=0o700)
        path.write_bytes(content)
        settings[name] = f"{before}{path}"
    return settings
