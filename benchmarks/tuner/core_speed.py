"""The speed of a core while a server computes on it, measured by a second process on the same core.

On a virtual machine, a core changes its speed by a quarter within a second, although the machine reports no waiting:
other machines use the same core and cache. A measurement before or after a burst therefore does not show the speed
during the burst. This process computes a fixed product every few milliseconds, about a tenth of the core's time, and
records its processor time. There are two products: a small one inside the first caches, and one that reads four
megabytes.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

EVERY_S = 0.004
SMALL_PRODUCTS = 10
SAMPLE_COLUMNS = 3
"""A sample: its monotonic time, and the processor time of the small products and of the large one, in ns."""
FIRST_SAMPLE_S = 20.0
LATE_SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class CoreSpeed:
    """Mean processor time of the products in a period, in microseconds."""

    small_us: float
    large_us: float


class SpeedProbe:
    """Reads the samples of a probe process."""

    def __init__(self, samples: Path) -> None:
        self._samples = samples

    def read(self) -> npt.NDArray[np.int64]:
        """[samples, 3]. An incomplete last sample is ignored."""
        values = np.fromfile(self._samples, dtype=np.int64)
        return values[: len(values) // SAMPLE_COLUMNS * SAMPLE_COLUMNS].reshape(-1, SAMPLE_COLUMNS)

    def between(self, start_ns: int, end_ns: int) -> CoreSpeed | None:
        """The mean of the samples that began between two monotonic times; None without a sample."""
        deadline_s = time.monotonic() + LATE_SAMPLE_S
        found = self.read()
        while (not len(found) or found[-1, 0] < end_ns) and time.monotonic() < deadline_s:
            time.sleep(EVERY_S)
            found = self.read()
        inside = found[(found[:, 0] >= start_ns) & (found[:, 0] <= end_ns)]
        if not len(inside):
            return None
        _, small_ns, large_ns = inside.mean(axis=0)
        return CoreSpeed(float(small_ns) / 1e3, float(large_ns) / 1e3)


@contextmanager
def running_probe(core: int | None) -> Iterator[SpeedProbe]:
    """A probe process on a core, on any core for None. Raises TimeoutError if it measures nothing."""
    with tempfile.TemporaryDirectory(prefix="core-speed-") as folder:
        samples = Path(folder) / "samples"
        samples.touch()
        words = [
            sys.executable,
            "-m",
            "benchmarks.tuner.core_speed",
            str(samples),
            *([] if core is None else [str(core)]),
        ]
        # With more threads, the products would run on other cores.
        single = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "MKL", "OMP")}
        process = subprocess.Popen(words, env={**os.environ, **single})
        try:
            _wait_for_samples(samples, process)
            yield SpeedProbe(samples)
        finally:
            process.terminate()
            process.wait()


def _wait_for_samples(samples: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + FIRST_SAMPLE_S
    while not samples.stat().st_size:
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise TimeoutError(f"the probe of the core's speed measured nothing within {FIRST_SAMPLE_S:g} s")
        time.sleep(EVERY_S)


def main() -> int:
    """Write samples to a file until the process is ended: FILE [CORE]."""
    path, *core = sys.argv[1:]
    if core:
        os.sched_setaffinity(0, {int(core[0])})
    rng = np.random.default_rng(0)
    one, other = rng.random((64, 128), dtype=np.float32), rng.random((128, 128), dtype=np.float32)
    matrix, vector = rng.random((1024, 1024), dtype=np.float32), rng.random(1024, dtype=np.float32)
    with Path(path).open("ab", buffering=0) as file:
        while True:
            time.sleep(EVERY_S)
            at_ns = time.monotonic_ns()
            # The caches hold data of the server first, so that the first products are not counted.
            one @ other
            small_ns = time.thread_time_ns()
            for _ in range(SMALL_PRODUCTS):
                one @ other
            small_ns = time.thread_time_ns() - small_ns
            matrix @ vector
            large_ns = time.thread_time_ns()
            matrix @ vector
            large_ns = time.thread_time_ns() - large_ns
            file.write(np.asarray([at_ns, small_ns, large_ns], dtype=np.int64).tobytes())


if __name__ == "__main__":
    sys.exit(main())
