"""Decode steps of fixed row counts, captured once and replayed: the whole step costs the host one launch.

Between two steps of the same rows only their newest ids are copied in, from the device: the captured step advances the
positions itself, and derives lengths and slots from positions and block table. If a step has fewer rows than were
captured, the others have position -1, own no keys and write into the reserved block 0.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.errors import ArgumentError
from reference_server.model_server.attention.staging import stage
from reference_server.model_server.device import no_waits
from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.memory.kv_cache import blocks_for
from reference_server.model_server.step_state import DecodePlan, Step, StepMetadata, StepTensors

logger = logging.getLogger(__name__)

MOST_ROWS = 512

CapturedStep = Callable[[], Tensor]


class GraphRunner(Protocol):
    """Records the launches of a step."""

    def capture(self, step: CapturedStep) -> CapturedStep:
        """Record `step`; returns a function that replays it, always into the same tensor."""
        ...


class CudaGraphs:
    """CUDA graphs of one memory pool. A graph's output is valid until another graph of the pool is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: CapturedStep) -> CapturedStep:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Tables, handles and kernels that are built at first use must exist before a capture. A step that
            # synchronizes fails here; in a capture it would leave the allocator and the pool in an undefined state.
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
    """The inputs of captured steps, at fixed addresses. positions: -1 where a row is empty."""

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
    """A forward that replays decode steps of the captured sizes and computes every other step."""

    def __init__(self, forward: RaggedForward, runner: Callable[[], GraphRunner], block_size: int) -> None:
        self._forward = forward
        self._make_runner = runner
        self._block_size = block_size
        self._replays: dict[int, CapturedStep] = {}
        # The graph of each size writes the hidden states here; draft heads read them.
        self._hidden: dict[int, Tensor] = {}
        self.inputs: StaticInputs | None = None
        # The rows whose tables are on the device, the size that was replayed, and the positions after it.
        self._plan: DecodePlan | None = None
        self._size = 0
        self._positions: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def sizes(self) -> list[int]:
        """The row counts captured, ascending."""
        return sorted(self._replays)

    def release(self) -> None:
        """Free all graphs. Must be called before their memory is freed."""
        self._replays.clear()
        self._hidden.clear()
        self.inputs = self._plan = None

    def capture(self, sizes: Sequence[int], max_total_tokens: int) -> None:
        """Capture a decode step of each size, the largest first; the forward computes those that fail."""
        self.release()
        if not sizes:
            return
        num_blocks = blocks_for(max_total_tokens, self._block_size)
        self.inputs = StaticInputs.empty(max(sizes), num_blocks, self._forward.device)
        runner = self._make_runner()
        if self._forward.hidden is not None:
            self._forward.hidden.is_read = True
        for size in sorted(sizes, reverse=True):
            try:
                self._replays[size] = runner.capture(self.make_step(self.inputs, size, max_total_tokens))
                if self._forward.hidden is not None and self._forward.hidden.rows is not None:
                    self._hidden[size] = self._forward.hidden.rows
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
        self._upload(inputs, size)
        logits = self._replays[size]()
        self._plan, self._size, self._positions = inputs.plan, size, inputs.positions + 1
        if self._forward.hidden is not None and self._forward.hidden.is_read:
            # A copy: it is read after the next replay too.
            self._forward.hidden.rows = self._hidden[size][: len(inputs.positions)].clone()
        return logits[: len(inputs.positions)]

    def replay_of(self, inputs: RaggedInputs) -> CapturedStep | None:
        """Replays this step and, at each further call, the step one token later; None if no graph takes it."""
        size = self._size_for(inputs)
        if size is None:
            return None
        self._upload(inputs, size)
        self._plan = None
        return self._replays[size]

    def computed(self, inputs: RaggedInputs) -> Tensor:
        """The captured step without its graph, with padding rows; a replay gives the same bits."""
        size = self._size_for(inputs)
        assert size is not None
        assert self.inputs is not None
        self._upload(inputs, size)
        self._plan = None
        most_tokens = self.inputs.block_table.shape[1] * self._block_size
        return self.make_step(self.inputs, size, most_tokens)()[: len(inputs.positions)]

    def _size_for(self, inputs: RaggedInputs) -> int | None:
        """The smallest captured size that holds the step; None if no graph takes it."""
        rows, metadata = len(inputs.positions), inputs.metadata
        if self.inputs is None or inputs.logits_index is not None or metadata.num_single_rows < metadata.num_rows:
            return None
        if metadata.block_table.shape[1] > self.inputs.block_table.shape[1]:
            return None
        return min((size for size in self._replays if size >= rows), default=None)

    def _upload(self, inputs: RaggedInputs, size: int) -> None:
        """Copy the step's inputs to the addresses that the graph reads, except inputs that are already there."""
        static = self.inputs
        assert static is not None
        rows = len(inputs.positions)
        is_next = (
            inputs.plan is not None
            and inputs.plan is self._plan
            and size == self._size
            and np.array_equal(inputs.positions, self._positions)
        )
        ids = inputs.input_ids
        arrays = [] if isinstance(ids, Tensor) else [ids]
        if not is_next:
            arrays += [inputs.positions, inputs.metadata.block_table.astype(np.int32)]
        staged = stage(arrays, self._forward.device) if arrays else []
        static.input_ids[:rows].copy_(ids if isinstance(ids, Tensor) else staged.pop(0))
        if not is_next:
            positions, table = staged
            static.positions[:rows].copy_(positions)
            static.positions[rows:size].fill_(-1)
            static.block_table[:rows, : table.shape[1]].copy_(table)

    def make_step(self, static: StaticInputs, size: int, max_total_tokens: int) -> CapturedStep:
        """The step to capture; it contains no value that is specific to one step."""
        input_ids, held, table = static.input_ids[:size], static.positions[:size], static.block_table[:size]
        block_size, forward = self._block_size, self._forward
        nothing = torch.zeros(1, dtype=torch.int32, device=held.device)
        # Capturable kernels read only the number of rows.
        numbers, host_table = np.ones(size, dtype=np.int64), np.zeros(tuple(table.shape), dtype=np.int64)

        def step() -> Tensor:
            lives = held >= 0
            positions = held.clamp(min=0)
            block = table.gather(1, (positions // block_size)[:, None])[:, 0].long()
            slots = (block * block_size + positions % block_size) * lives
            tensors = StepTensors(slots, table, (held + 1).int(), nothing, nothing)
            metadata = StepMetadata(numbers, host_table, numbers, numbers, size)
            logits = forward.run(input_ids, positions, None, Step(metadata, tensors), max_total_tokens - 1)
            held.add_(lives)
            return logits

        return step


def graph_sizes(requested: tuple[int, ...] | None, most_rows: int) -> list[int]:
    """The row counts to capture, up to the rows that fit: `requested`, (0,) for none, None for the default list.

    >>> graph_sizes(None, 40)
    [1, 2, 4, 8, 16, 24, 32, 40]
    >>> graph_sizes((8, 0, 2), 100), graph_sizes((0,), 100)
    ([2, 8], [])
    """
    own = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, MOST_ROWS + 1, 32)]
    wanted = own if requested is None else sorted({size for size in requested if size > 0})
    return [size for size in wanted if size <= most_rows]


def refuse_graphs(requested: tuple[int, ...] | None, reason: str) -> None:
    """Raise ArgumentError if sizes were requested that cannot be captured."""
    if requested is not None and any(size > 0 for size in requested):
        raise ArgumentError(f"`--cuda-graphs {','.join(map(str, requested))}` cannot be served: {reason}; give 0")
