"""The bundled server with longer model steps: a slowdown of known size at any concurrency, to test the gate.

    python -m benchmarks.reports.slowed_step --factor 1.05 --model-id preset:tiny-llama

After each step, launched ahead or not, the compute thread waits until the step has taken `factor` times its time. It
waits without sleep, and other threads of its process can run. All other flags are those of `text-generation-launcher`.
In a comparison, start both servers with this module, one of them with factor 1, so that both have its cost.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from reference_server.launcher import cli as launcher
from reference_server.launcher.children import Programs
from reference_server.messages import Batch, CachedBatch, StepResult
from reference_server.model_server import cli as model_server
from reference_server.model_server.calls import local_shard
from reference_server.model_server.calls.rank_calls import RankCalls


@contextmanager
def stretched(factor: float, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Wait without sleep at the end of the block until it has taken `factor` times its time."""
    started = clock()
    yield
    until = started + factor * (clock() - started)
    while clock() < until:
        time.sleep(0)  # releases the interpreter's lock: a thread that waits for it would wait 5 ms


def slowed_calls(factor: float) -> type[RankCalls]:
    """The calls of one rank, with longer steps. A step launched ahead is computed in `after_reply`."""

    class SlowedCalls(RankCalls):
        def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
            with stretched(factor):
                return super().prefill(batch, cached)

        def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
            with stretched(factor):
                return super().decode(batches)

        def after_reply(self) -> None:
            with stretched(factor):
                super().after_reply()

    return SlowedCalls


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, required=True, help="Factor of step times; 1.05 means 5 %% longer.")
    parser.add_argument("--shard", action="store_true", help=argparse.SUPPRESS)
    args, words = parser.parse_known_args(argv)
    if args.factor < 1:
        parser.error("`--factor` must be at least 1")
    if args.shard:
        # `LocalShard` takes no other class.
        setattr(local_shard, "RankCalls", slowed_calls(args.factor))  # noqa: B010  # mypy refuses the assignment
        return model_server.main(words)
    own = (sys.executable, "-m", "benchmarks.reports.slowed_step", "--shard", "--factor", f"{args.factor:g}")
    return launcher.main(words, programs=dataclasses.replace(Programs.beside(sys.executable), server=own))


if __name__ == "__main__":
    sys.exit(main())
