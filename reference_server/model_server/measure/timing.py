"""Time calls on the device."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_ms(device: torch.device, call: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each call: between device events on a GPU, else wall time."""
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    synchronize(device)
    return [first.elapsed_time(second) for first, second in itertools.pairwise(events)]


def median_and_spread(
    device: torch.device, call: Callable[[], object], warmups: int, repeats: int
) -> tuple[float, float]:
    """The median of two rounds in ms, and the relative difference of the rounds' medians."""
    for _ in range(warmups):
        call()
    synchronize(device)
    rounds: Sequence[list[float]] = [timed_ms(device, call, max(2, repeats // 2)) for _ in range(2)]
    medians = [statistics.median(times) for times in rounds]
    middle = statistics.median([time for times in rounds for time in times])
    return middle, abs(medians[0] - medians[1]) / middle
