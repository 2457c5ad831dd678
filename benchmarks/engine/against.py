"""Compares the engines of this and another checkout, in process and interleaved: tokens/s and processor time per token.

    python -m benchmarks.engine.against OTHER [--models preset:tiny-llama ...] [--concurrency 1 8 32] [--repeats 7]

OTHER is the directory of a checkout; its `.venv` is used if it has one. Each checkout runs the `engine` worker of its
own in_process.py. A ratio is the speed of this checkout divided by that of the other: above 1 this checkout is faster.
Ratios are medians over the repeats with their ranges. On a busy machine, use processor time.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.engine.in_process import NEW_TOKENS, ContenderProcess

HERE = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, metavar="OTHER")
    parser.add_argument("--models", nargs="+", default=["preset:tiny-llama", "preset:llama-125m"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for model in args.models:
        with ExitStack() as stack:
            workers = [stack.enter_context(worker_of(checkout, model)) for checkout in (HERE, args.other.resolve())]
            for rows in args.concurrency:
                print(compare(model, workers, rows, args.repeats), flush=True)


@contextmanager
def worker_of(checkout: Path, model: str) -> Iterator[ContenderProcess]:
    """The worker of a checkout, with the interpreter of the checkout."""
    interpreter = checkout / ".venv" / "bin" / "python"
    worker = ContenderProcess(
        "engine",
        model,
        interpreter=str(interpreter) if interpreter.is_file() else sys.executable,
        script=checkout / "benchmarks" / "engine" / "in_process.py",
        environment=os.environ | {"PYTHONPATH": str(checkout)},
    )
    try:
        yield worker
    finally:
        worker.close()


def compare(model: str, workers: list[ContenderProcess], rows: int, repeats: int) -> str:
    """A line of ratios. The first round is not counted, and the order of the two workers alternates."""
    speed: list[float] = []
    processor: list[float] = []
    for repeat in range(repeats + 1):
        found = {}
        for worker in workers if repeat % 2 else workers[::-1]:
            before = processor_ns(worker.pid)
            rate = worker.run(rows, seed=repeat)
            found[worker] = rate, (processor_ns(worker.pid) - before) / (rows * NEW_TOKENS)
        (own_rate, own_ns), (other_rate, other_ns) = (found[worker] for worker in workers)
        if repeat:
            speed.append(own_rate / other_rate)
            processor.append(other_ns / own_ns)
    return f"{model} C={rows}: tokens/s {_summary(speed)}, tokens per processor second {_summary(processor)}"


def processor_ns(pid: int) -> int:
    """Processor time of all threads of a process so far, in ns (Linux)."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())


def _summary(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f}, n={len(ratios)})"


if __name__ == "__main__":
    main()
