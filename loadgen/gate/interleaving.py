"""A pair measured in slices: both servers are launched once, and the load alternates between them, A B B A A B ….

The idle server waits. Each slice is a run of the load with its own warm-up. Both slices of a slice pair send the same
texts, which are new to both servers. Drift of the machine is common to two slices that follow each other, so it cancels
in their difference; two separate runs are a launch apart, so there it does not cancel. The metrics of all slices but
the first are read after the last one, so that the slices follow each other sooner.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import MeasurementError, StartError, UsageError
from loadgen.gate.live_runs import ReadRun
from loadgen.gate.pairing import ATTEMPTS, pair_order
from loadgen.gate.sides import LiveSide, SideSpec, planned_words
from loadgen.progress import ProgressDisplay
from loadgen.target.launched.launch import port_in
from loadgen.target.launched.process_memory import memory_of
from reports.gate.side_run import Pair
from reports.metrics.checks.findings import Level

MOST_SLICES = 50
MEMORY_FLAG = "--cuda-memory-fraction"


class SliceServer(Protocol):
    """A launched server on which slices are run."""

    @property
    def pid(self) -> int | None: ...

    def measured(self, directory: Path, salt: str | None) -> ReadRun: ...


class SliceMeasure(Protocol):
    """Launches servers for slices, and names the texts of a slice pair."""

    def launch(self, side: LiveSide, log: Path) -> AbstractContextManager[SliceServer]: ...

    def salt_of(self, text: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice of each side, in their order, on the servers by letter."""

    name: str
    order: Sequence[LiveSide]
    servers: Mapping[str, SliceServer]


ReadPair = Callable[[], Pair]


@dataclass(frozen=True, slots=True)
class InterleavedSlices:
    """Measures pairs in `slices` slices a side. `memory` reports a process's resident and the machine's free bytes."""

    slices: int
    measure: SliceMeasure
    out: Path
    progress: ProgressDisplay
    memory: Callable[[int], tuple[int, int] | None] = memory_of

    def __call__(self, number: int, sides: tuple[LiveSide, LiveSide]) -> Pair:
        """One pair: two launches, then the slices. Raises MeasurementError."""
        name = f"pair{number:02d}"
        with ExitStack() as stack:
            servers: dict[str, SliceServer] = {}
            for side in pair_order(number, sides):
                self._check_memory(servers, side)
                servers[side.letter] = self._launched(side, name, servers, stack)
            slices = [
                Slice(f"{name}-slice{each:02d}", pair_order(number + each + 1, sides), servers)
                for each in range(1, self.slices + 1)
            ]
            first = self._valid(slices[0], self._measured(slices[0]))
            if not first.is_valid:
                return Pair.of_slices([first])
            unread = [(each, self._measured(each)) for each in slices[1:]]
            return Pair.of_slices([first, *(self._valid(each, read) for each, read in unread)])

    def _launched(self, side: LiveSide, name: str, servers: dict[str, SliceServer], stack: ExitStack) -> SliceServer:
        log = self.out / f"{name}-{side.letter}.log"
        self.progress.show(f"{name}: launching {side.label}")
        try:
            return stack.enter_context(self.measure.launch(side, log))
        except StartError as error:
            if not servers:
                raise
            raise MeasurementError(
                f"{side.label} does not start while the other server is up; if the machine holds only one of them, "
                f"leave out --interleave: {error}"
            ) from error

    def _check_memory(self, servers: dict[str, SliceServer], side: LiveSide) -> None:
        """Raises MeasurementError if less memory is free than the other server takes."""
        for server in servers.values():
            found = self.memory(server.pid) if server.pid is not None else None
            if found is not None and found[1] < found[0]:
                resident, free = (each / 2**20 for each in found)
                raise MeasurementError(
                    f"{side.label} is not launched with the other server running, which takes {resident:,.0f} MiB and "
                    f"{free:,.0f} MiB of memory are free; leave out --interleave"
                )

    def _measured(self, slice_: Slice, again: str = "") -> ReadPair:
        """One run of each side."""
        self.progress.show(f"{slice_.name}{again}: {', '.join(side.label for side in slice_.order)}")
        salt = self.measure.salt_of(slice_.name + again)
        reads = {
            side.letter: slice_.servers[side.letter].measured(self.out / f"{slice_.name}-{side.letter}{again}", salt)
            for side in slice_.order
        }
        return lambda: Pair(a=reads["a"](), b=reads["b"]())

    def _valid(self, slice_: Slice, read: ReadPair) -> Pair:
        """The slice pair; an invalid one is repeated once."""
        for attempt in range(1, ATTEMPTS + 1):
            pair = read()
            if pair.is_valid:
                break
            invalid = [run for run in (pair.a, pair.b) if run.status == Level.INVALID]
            self.progress.show(f"  invalid: {'; '.join(reason for run in invalid for reason in run.reasons)}")
            if attempt < ATTEMPTS:
                read = self._measured(slice_, f"-again{attempt}")
        return pair


def check_interleaving(slices: int | None, specs: Sequence[SideSpec], load: BenchConfig, num_gpus: int) -> None:
    """Raises UsageError if both servers cannot be up together, naming the reason and the remedy."""
    if slices is None:
        return
    problem = _interleaving_problem(slices, specs, load, num_gpus)
    if problem is not None:
        raise UsageError(f"`interleave` is {slices} but {problem}")


def _interleaving_problem(slices: int, specs: Sequence[SideSpec], load: BenchConfig, num_gpus: int) -> str | None:
    if not 2 <= slices <= MOST_SLICES:
        return f"must be 2 to {MOST_SLICES}"
    stored = [spec for spec in specs if spec.is_stored]
    if stored:
        return f"{stored[0].name} is stored; slices need two live sides"
    urls = {spec.name.rstrip("/") for spec in specs if spec.kind == "url"}
    if sum(spec.kind == "url" for spec in specs) > len(urls):
        return f"both sides are the server {urls.pop()}; give two servers, or leave out --interleave"
    launched = {spec.letter: planned_words(spec, load) for spec in specs if spec.kind != "url"}
    ports = {port_in(words) for words in launched.values()} - {None}
    if len(launched) == 2 and len(ports) == 1 and all(port_in(words) for words in launched.values()):
        return f"both commands set port {ports.pop()}; leave the port out: each launch gets a free one"
    if num_gpus and len(launched) == 2:
        shares = [_memory_share(words) for words in launched.values()]
        if sum(shares) > 1:
            return (
                f"this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''} and the servers take "
                f"{' + '.join(f'{share:g}' for share in shares)} of the memory; add {MEMORY_FLAG} 0.45 to both "
                "(--args-a, --args-b), give each side its own CUDA_VISIBLE_DEVICES, or leave out --interleave"
            )
    return None


def _memory_share(words: Sequence[str]) -> float:
    """The share of a GPU that a command takes: 1 unless it sets one; 0 if it names devices of its own.

    >>> _memory_share(["serve", "--cuda-memory-fraction", "0.4"]), _memory_share(["env", "CUDA_VISIBLE_DEVICES=1", "s"])
    (0.4, 0.0)
    """
    share = 1.0
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("CUDA_VISIBLE_DEVICES=") or (
            word == "--gpus" and following.startswith(("device=", '"device='))
        ):
            return 0.0
        name, _, value = word.partition("=")
        if name == MEMORY_FLAG:
            with contextlib.suppress(ValueError):
                share = float(value or following)
    return share
