"""The products of adapters on a GPU: two Triton kernels for all groups of a site, of any ranks."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference_server.model_server.attention.triton_backend import LEAST_TILE, power_of_two
from reference_server.model_server.models.adapters.site import SiteFactors
from reference_server.model_server.step_state import AdapterSegments

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_PARTS = 3
"""Queries, keys and values."""
FIELDS = 2 + 5 * MAX_PARTS
MAX_ROWS = 64
RANK_TILE = 16
INPUT_TILE = 64
OUTPUT_TILE = 64
MAX_SPLITS = 8
"""Largest number of splits of the inputs, which give few tokens and ranks more programs. It does not depend on the
batch."""


@dataclass(frozen=True, slots=True)
class _Room:
    """The largest numbers of a site's factors, which size the grids."""

    ranks: int
    outputs: int
    parts: int

    @classmethod
    def of(cls, factors: Iterable[SiteFactors]) -> "_Room":
        each = [(len(one.a), update.b.shape[0], len(one.updates)) for one in factors for update in one.updates]
        return cls(*map(max, zip(*each, strict=True))) if each else cls(0, 0, 0)


class TritonProduct:
    """The reference is TorchProduct. The host reads no device tensor, so a step does not wait."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._table = torch.zeros(0, 0, FIELDS, dtype=torch.int64, device=device)
        self._factors: dict[int, dict[int, SiteFactors]] = {}
        self._rooms: dict[int, _Room] = {}

    def stored(self, factors: SiteFactors) -> SiteFactors:
        return factors

    def put(self, site: int, slot: int, stored: SiteFactors | None) -> None:
        self._grow(site + 1, slot + 1)
        at_site = self._factors.setdefault(site, {})
        if stored is None:
            at_site.pop(slot, None)
            self._table[site, slot].zero_()
        else:
            at_site[slot] = stored
            self._table[site, slot].copy_(torch.tensor(_record(stored)))
        self._rooms[site] = _Room.of(at_site.values())

    def add(self, site: int, segments: AdapterSegments, rows: Tensor, result: Tensor) -> None:
        room = self._rooms.get(site)
        if room is None or not room.ranks:
            return
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        tokens, inputs = len(segments.rows.order), rows.shape[1]
        longest = int(np.diff(segments.rows.starts).max())
        tile = power_of_two(min(MAX_ROWS, longest), LEAST_TILE)
        row_tiles = -(-longest // tile)
        programs = len(segments.rows.groups) * row_tiles
        splits = min(MAX_SPLITS, -(-inputs // (4 * INPUT_TILE)))
        share = -(-inputs // (splits * INPUT_TILE)) * INPUT_TILE
        shrunk = torch.empty((splits, tokens, room.ranks), dtype=torch.float32, device=rows.device)
        table = self._table[site]
        kernels().shrink[(programs, -(-room.ranks // RANK_TILE), splits)](
            *(rows, shrunk, table, segments.order, segments.starts, segments.groups),
            *(rows.stride(0), inputs, tokens, room.ranks, row_tiles, share),
            FIELDS=FIELDS,
            ROWS=tile,
            RANKS=RANK_TILE,
            TILE=INPUT_TILE,
            num_warps=4,
        )
        kernels().expand[(programs, -(-room.outputs // OUTPUT_TILE), room.parts)](
            *(shrunk, result, table, segments.order, segments.starts, segments.groups),
            *(result.stride(0), tokens, room.ranks, row_tiles),
            FIELDS=FIELDS,
            ROWS=tile,
            RANKS=RANK_TILE,
            TILE=OUTPUT_TILE,
            SPLITS=splits,
            num_warps=4,
        )

    def _grow(self, sites: int, slots: int) -> None:
        have_sites, have_slots, _ = self._table.shape
        if sites <= have_sites and slots <= have_slots:
            return
        capacity = have_slots if slots <= have_slots else max(slots, 2 * have_slots)
        grown = self._table.new_zeros(max(sites, have_sites), capacity, FIELDS)
        grown[:have_sites, :have_slots] = self._table
        self._table = grown


def _record(factors: SiteFactors) -> list[int]:
    """The record of the kernels; its addresses are valid while `factors` lives."""
    record = [factors.a.data_ptr(), len(factors.a)]
    for update in factors.updates:
        outputs, rank = update.b.shape
        record += [update.b.data_ptr(), rank, update.first_rank, outputs, update.first_output]
    return record + [0] * (FIELDS - len(record))


@functools.cache
def kernels() -> Any:
    """The module of the kernels; only a machine with Triton can import it."""
    from reference_server.model_server.models.adapters import shrink_expand

    return shrink_expand
