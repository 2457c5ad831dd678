"""Finds the best length of a slice of `tgi-bench compare --interleave` on this machine, from one long run.

    tgi-bench run --config docs/ci/gate.toml --duration 100s --out runs/long
    python -m benchmarks.reports.slice_length runs/long --overhead 2.2

In addition to its own length, a slice takes the time of its warm-up, of the start of its load process and of its
results. Short slices follow each other sooner, so less of the machine's drift is between them; long ones waste less
time. The table has, for each length, the standard deviation of the difference of output tokens per second between two
slices that follow each other after the overhead, and the standard error of the mean difference of all slice pairs that
fit in `--minutes` without launches.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reports.run_schema import Status
from reports.saved_run import load_run

LENGTHS_S = (0.5, 1.0, 2.0, 3.0, 4.0, 8.0)
LEAST_PAIRS = 4
OFFSET_S = 0.1
"""Slices are cut from the run at every multiple of this offset."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--overhead", type=float, default=2.2, metavar="S", help="Time of a slice beyond its length.")
    parser.add_argument("--minutes", type=float, default=12.0, help="Length of the comparison.")
    args = parser.parse_args()
    times_s = token_times(args.run)
    print(f"{'slice, s':>8} {'slice pair, %':>14} {'pairs':>6} {'standard error, %':>18}")
    for length_s in LENGTHS_S:
        deviation = pair_deviation(times_s, length_s, args.overhead)
        if deviation is not None:
            pairs = 60 * args.minutes / (2 * (length_s + args.overhead))
            print(f"{length_s:>8g} {100 * deviation:>14.1f} {pairs:>6.0f} {100 * deviation / math.sqrt(pairs):>18.2f}")


def token_times(run: Path) -> npt.NDArray[np.float64]:
    """The times at which the tokens of successful requests were received, in seconds, sorted."""
    streams = [
        (record.t_first_ns + np.concatenate(([0], np.cumsum(record.gap_ns)))) / 1e9
        for record in load_run(run).records
        if record.status == Status.OK and record.t_first_ns is not None
    ]
    return np.sort(np.concatenate(streams))


def pair_deviation(
    times_s: Sequence[float] | npt.NDArray[np.float64], length_s: float, overhead_s: float
) -> float | None:
    """The standard deviation of the difference of a slice pair, relative to the mean; None if too few pairs fit.

    times_s: of tokens, sorted.
    """
    period_s, differences, amounts = length_s + overhead_s, [], []
    for offset_s in np.arange(0, 2 * period_s, OFFSET_S):
        starts = np.arange(times_s[0] + offset_s, times_s[-1] - length_s, period_s)
        if len(starts) < 2 * LEAST_PAIRS:
            return None
        amount = np.searchsorted(times_s, starts + length_s) - np.searchsorted(times_s, starts)
        pairs = amount[: len(amount) // 2 * 2].reshape(-1, 2)
        differences.append(pairs[:, 1] - pairs[:, 0])
        amounts.append(amount)
    return float(np.std(np.concatenate(differences)) / np.concatenate(amounts).mean())


if __name__ == "__main__":
    main()
