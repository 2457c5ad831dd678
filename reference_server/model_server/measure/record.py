"""Results of a measuring run, written to a file after every part."""

import gc
import json
import math
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from reference_server.model_server.device import first_line, release_unused

SCHEMA = 1
# Time that a part may take beyond the limit of the run.
OVERTIME_S = 60.0
SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "compute_mode")


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """Shapes to measure, and repetitions."""

    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (512, 2048)
    prefills: tuple[tuple[int, int], ...] = ((1, 512), (1, 2048), (4, 2048), (1, 8192))
    kernel_batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    kernel_contexts: tuple[int, ...] = (512, 2048, 8192)
    engine_batches: tuple[int, ...] = (1, 32, 256)
    engine_steps: int = 256
    peer_batches: tuple[int, ...] = (1, 32)
    peer_prompt: int = 512
    peer_tokens: int = 128
    warmups: int = 5
    replays: int = 50
    ceiling_bytes: int = 4 << 30
    square: int = 8192

    @classmethod
    def quick(cls) -> "MeasurePlan":
        """A plan small enough for a CPU."""
        return cls(
            batches=(1, 4),
            contexts=(32,),
            prefills=((1, 16), (2, 32)),
            kernel_batches=(2,),
            kernel_contexts=(64,),
            engine_batches=(4,),
            engine_steps=12,
            peer_batches=(2,),
            peer_prompt=16,
            peer_tokens=8,
            warmups=1,
            replays=4,
            ceiling_bytes=32 << 20,
            square=256,
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number. level: K kernel, S step, E engine. floor: least time by this run's ceilings, in the same unit."""

    preset: str
    level: str
    phase: str
    batch: int
    context: int
    value: float
    unit: str
    floor: float | None = None
    efficiency: float | None = None
    kernels: int | None = None
    spread: float | None = None
    valid: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """Results, ceilings and notes of a run of at most `limit_s` seconds."""

    device: torch.device
    limit_s: float
    path: Path | None
    settings: dict[str, Any]
    results: list[Measurement] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    is_valid: bool = True
    # A fatal error of the device: nothing can run on it any more in this process.
    device_error: str | None = None
    device_facts: dict[str, Any] = field(init=False)
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.device_facts = device_facts(self.device)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float:
        return self.limit_s - self.elapsed

    @property
    def failed(self) -> bool:
        """Whether a part raised."""
        return any(part["error"] is not None for part in self.parts)

    def attempt(self, name: str, part: Callable[[], object], limit_s: float | None = None) -> None:
        """Run a part unless time is up. limit_s: default is the remaining time and OVERTIME_S.

        Errors are recorded and the run continues; after a failed device, further parts are skipped.
        """
        reason = "the device has failed" if self.device_error else "the time is up" if self.seconds_left <= 0 else None
        if reason is not None:
            self.note(f"{name}: skipped, {reason}")
            return
        print(f"[{self.elapsed:6.1f} s] {name}", file=sys.stderr, flush=True)
        started, error = self.elapsed, None
        try:
            with deadline(self.seconds_left + OVERTIME_S if limit_s is None else limit_s):
                part()
        except Exception as raised:
            error = f"{type(raised).__name__}: {first_line(raised)}"
            self.note(f"{name}: {error}")
            traceback.print_exc()
            if isinstance(raised, torch.AcceleratorError):
                self.device_error = error
        if error is not None:
            gc.collect()
        self.parts.append(
            {"name": name, "begun_s": round(started, 1), "s": round(self.elapsed - started, 1), "error": error}
        )
        self.write()
        release_unused(self.device)

    def add(self, preset: str, level: str, phase: str, batch: int, context: int, value: float, **more: Any) -> None:
        """Store a number. The efficiency of a time is `floor / value`."""
        floor = more.get("floor")
        efficiency = more.pop("efficiency", None if floor is None else floor / value)
        unit = more.pop("unit", "ms")
        self.results.append(
            Measurement(
                preset, level, phase, batch, context, value, unit, efficiency=efficiency, valid=self.is_valid, **more
            )
        )

    def check(self, name: str, found: float, limit: float) -> None:
        """Compare a relative error with its limit; a failed check makes every later number invalid."""
        passed = found <= limit
        # JSON has no infinity, the error of a kernel that raised.
        self.checks.append(
            {"name": name, "found": found if math.isfinite(found) else None, "limit": limit, "passed": passed}
        )
        if not passed:
            self.is_valid = False
            self.note(f"failed: {name}: error {found:.3g}, limit {limit:.3g}")

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "device": self.device_facts,
            "versions": versions(),
            "settings": {name: str(value) for name, value in self.settings.items()},
            "ceilings": self.ceilings,
            "models": self.models,
            "checks": self.checks,
            "valid": self.is_valid,
            "results": [asdict(result) for result in self.results],
            "peers": self.peers,
            "notes": self.notes,
            "parts": self.parts,
            "device_error": self.device_error,
            "elapsed_s": round(self.elapsed, 1),
        }

    def write(self) -> None:
        """Replace the file atomically: a killed run keeps the results of earlier parts."""
        if self.path is not None:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.as_dict(), indent=1))
            partial.replace(self.path)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block after `seconds`. A call into C is not interrupted."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    previous_handler = signal.signal(signal.SIGALRM, expire)
    previous_s, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, previous_s)
        signal.signal(signal.SIGALRM, previous_handler)


def device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": device.type, "name": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "type": device.type,
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "memory_bytes": properties.total_memory,
        "processors": properties.multi_processor_count,
    }
    for name in ("clock_rate", "power_draw", "temperature"):
        try:
            facts[name] = getattr(torch.cuda, name)(device)
        except Exception as error:  # NVML is optional
            facts[name] = f"unknown: {type(error).__name__}"
    return facts


def smi_facts(device: torch.device) -> dict[str, str]:
    """Clocks and limits of a GPU from nvidia-smi, now; empty if it is missing or fails."""
    if device.type != "cuda":
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        uuid = torch.cuda.get_device_properties(device).uuid
        done = subprocess.run([*command, f"--id=GPU-{uuid}"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, AttributeError, subprocess.SubprocessError):
        return {}
    return dict(zip(SMI_FIELDS, done.stdout.strip().split(", "), strict=False))


def versions() -> dict[str, str | None]:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "transformers": transformers.__version__,
        "triton": triton_version,
        "numpy": np.__version__,
    }
