"""Decode steps of fixed row counts, captured once and replayed: the whole step costs the host one launch.

Between two steps of the same rows nothing is copied in but their newest ids, and those from the device: the captured
step advances the positions itself, and finds lengths and slots from positions and block table. A step of fewer rows
than were captured fills up with rows of position -1, which own no keys and write into the reserved block 0.
"""

import gc
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.errors import ArgumentError
from reference_server.model_server.attention.staging import DeviceMetadata, stage
from reference_server.model_server.attention.state import AttentionMetadata
from reference_server.model_server.device import no_waits
from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.kv_cache import blocks_for

logger = logging.getLogger(__name__)

MOST_ROWS = 512

Step = Callable[[], Tensor]


class GraphRunner(Protocol):
    """Records what a step launches."""

    def capture(self, step: Step) -> Step:
        """Run `step` once in recording; what replays it. Both give the same tensor every time."""
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory. A graph's output holds until another graph of the pool is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step) -> Step:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # What is built at first use (tables, handles, compiled kernels) has to be there before a capture, and a
            # step that waits is found here: in a capture it would leave the allocator and the pool in between.
            step()
            with no_waits():
                step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = step()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """What captured steps read, at addresses for life. positions: -1 where a row is empty."""

    input_ids: Tensor
    positions: Tensor
    block_table: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_blocks: int, device: torch.device) -> "StaticInputs":
        return cls(
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.full((num_rows,), -1, dtype=torch.int64, device=device),
            torch.zeros((num_rows, num_blocks), dtype=torch.int32, device=device),
        )


class GraphedForward:
    """A forward whose decode steps are replayed where their size was captured; every other step goes through it."""

    def __init__(self, forward: RaggedForward, runner: Callable[[], GraphRunner], block_size: int) -> None:
        self._forward = forward
        self._make_runner = runner
        self._block_size = block_size
        self._replays: dict[int, Step] = {}
        self._inputs: StaticInputs | None = None
        # The rows whose tables lie on the device, how many were replayed, and the positions that the step left there.
        self._rows: object = None
        self._size = 0
        self._positions: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def sizes(self) -> list[int]:
        """The row counts captured, ascending."""
        return sorted(self._replays)

    def release(self) -> None:
        """Let all graphs go, before what they point at does."""
        self._replays.clear()
        self._inputs = self._rows = None

    def capture(self, sizes: Sequence[int], max_total_tokens: int) -> None:
        """Capture a decode step of each size, the largest first; one that cannot be is left to the forward."""
        self.release()
        if not sizes:
            return
        num_blocks = blocks_for(max_total_tokens, self._block_size)
        self._inputs = StaticInputs.empty(max(sizes), num_blocks, self._forward.device)
        runner = self._make_runner()
        for size in sorted(sizes, reverse=True):
            try:
                self._replays[size] = runner.capture(self._step(self._inputs, size, max_total_tokens))
            except torch.OutOfMemoryError as error:
                logger.warning("no memory for a CUDA graph of %d rows: %s", size, error)
            except RuntimeError as error:
                logger.warning("this model's step cannot be captured in a CUDA graph and runs without: %s", error)
                self.release()
                break
        gc.collect()

    def __call__(self, inputs: RaggedInputs) -> Tensor:
        """[logit rows, vocab_size], until the next call."""
        size = self._size_for(inputs)
        if size is None:
            return self._forward(inputs)
        self._bring(inputs, size)
        logits = self._replays[size]()
        self._rows, self._size, self._positions = inputs.attention.batch_memo, size, inputs.positions + 1
        return logits[: len(inputs.positions)]

    def replay_of(self, inputs: RaggedInputs) -> Step | None:
        """What replays this step and, at each further call, the one a token later; None where no graph takes it."""
        size = self._size_for(inputs)
        if size is None:
            return None
        self._bring(inputs, size)
        self._rows = None
        return self._replays[size]

    def computed(self, inputs: RaggedInputs) -> Tensor:
        """The captured step run without its graph, padding rows and all: what a replay has to give bit for bit."""
        size = self._size_for(inputs)
        assert size is not None
        assert self._inputs is not None
        self._bring(inputs, size)
        self._rows = None
        most_tokens = self._inputs.block_table.shape[1] * self._block_size
        return self._step(self._inputs, size, most_tokens)()[: len(inputs.positions)]

    def _size_for(self, inputs: RaggedInputs) -> int | None:
        """The smallest captured size that takes the step; None for one that no graph takes."""
        rows, attention = len(inputs.positions), inputs.attention
        if self._inputs is None or inputs.logits_index is not None or attention.num_decode_rows < attention.num_rows:
            return None
        if attention.block_table.shape[1] > self._inputs.block_table.shape[1]:
            return None
        return min((size for size in self._replays if size >= rows), default=None)

    def _bring(self, inputs: RaggedInputs, size: int) -> None:
        """Put the step's inputs where the graph reads them: what is not there already."""
        static = self._inputs
        assert static is not None
        rows = len(inputs.positions)
        is_next = (
            inputs.attention.batch_memo is self._rows
            and size == self._size
            and np.array_equal(inputs.positions, self._positions)
        )
        ids = inputs.input_ids
        arrays = [] if isinstance(ids, Tensor) else [ids]
        if not is_next:
            arrays += [inputs.positions, inputs.attention.block_table.astype(np.int32)]
        staged = stage(arrays, self._forward.device) if arrays else []
        static.input_ids[:rows].copy_(ids if isinstance(ids, Tensor) else staged.pop(0))
        if not is_next:
            positions, table = staged
            static.positions[:rows].copy_(positions)
            static.positions[rows:size].fill_(-1)
            static.block_table[:rows, : table.shape[1]].copy_(table)

    def _step(self, static: StaticInputs, size: int, max_total_tokens: int) -> Step:
        """What is captured: nothing in it is a number of one step."""
        input_ids, held, table = static.input_ids[:size], static.positions[:size], static.block_table[:size]
        block_size, forward = self._block_size, self._forward
        nothing = torch.zeros(1, dtype=torch.int32, device=held.device)
        # Kernels that can be captured read only how many rows there are.
        numbers, host_table = np.ones(size, dtype=np.int64), np.zeros(tuple(table.shape), dtype=np.int64)

        def step() -> Tensor:
            lives = held >= 0
            positions = held.clamp(min=0)
            block = table.gather(1, (positions // block_size)[:, None])[:, 0].long()
            slots = (block * block_size + positions % block_size) * lives
            placed = DeviceMetadata(slots, table, (held + 1).int(), nothing, nothing)
            memo: dict[Hashable, object] = {DeviceMetadata: placed}
            attention = AttentionMetadata(numbers, host_table, numbers, numbers, size, step_memo=memo)
            logits = forward.run(input_ids, positions, None, attention, max_total_tokens - 1)
            held.add_(lives)
            return logits

        return step


def graph_sizes(asked: tuple[int, ...] | None, most_rows: int) -> list[int]:
    """The row counts to capture: those asked for, 0 for none, or 1, 2, 4 and ever wider steps up to the rows that fit.

    >>> graph_sizes(None, 40)
    [1, 2, 4, 8, 16, 24, 32, 40]
    >>> graph_sizes((8, 0, 2), 100), graph_sizes((0,), 100)
    ([2, 8], [])
    """
    own = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, MOST_ROWS + 1, 32)]
    wanted = own if asked is None else sorted({size for size in asked if size > 0})
    return [size for size in wanted if size <= most_rows]


def refuse_graphs(asked: tuple[int, ...] | None, reason: str) -> None:
    """Raise ArgumentError where sizes were asked for that nothing captures."""
    if asked is not None and any(size > 0 for size in asked):
        raise ArgumentError(f"`--cuda-graphs {','.join(map(str, asked))}` cannot be served: {reason}; give 0")
