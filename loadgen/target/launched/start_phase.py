"""The phase of a server that starts, from its log: download, loading, compilation, warm-up. The last match counts."""

import re
from pathlib import Path

MAX_READ_BYTES = 200_000
# Lines of the bundled server and TGI, vLLM, SGLang and llama.cpp.
PHASES = (
    ("downloading weights", re.compile(r"downloading (the )?weights|download(ing)? file|downloading shards", re.I)),
    (
        "loading weights",
        re.compile(
            r"waiting for (\d+ )?shard|waiting for shard|loading (model )?weights|starting to load model"
            r"|loading safetensors|loading checkpoint shards|load weight begin|loading model tensors",
            re.I,
        ),
    ),
    (
        "compiling kernels",
        re.compile(r"compiling the .*kernels|compiling a graph|dynamo bytecode transform|jit.?compil", re.I),
    ),
    ("capturing CUDA graphs", re.compile(r"capturing cuda graph|capture cuda graph begin", re.I)),
    ("warming up", re.compile(r"warming up", re.I)),
)


def phase_in(log: str) -> str:
    """The phase that the last matching line of a log names; empty if no line matches.

    >>> phase_in("INFO Waiting for 1 shard(s)\\nINFO Warming up model\\nINFO 3 blocks")
    'warming up'
    """
    for line in reversed(log.splitlines()):
        for phase, pattern in PHASES:
            if pattern.search(line):
                return phase
    return ""


def waiting_line(waited_s: float, log: Path) -> str:
    """The message while a server starts: its phase, if its log names one, and the time since the launch."""
    try:
        text = log.read_bytes()[-MAX_READ_BYTES:].decode(errors="replace")
    except OSError:
        text = ""
    phase = phase_in(text)
    return f"waiting for the server{f': {phase}' if phase else ''}, {waited_s:.0f} s"
