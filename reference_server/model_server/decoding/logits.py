"""Logits to the distribution that a token is chosen from: watermark, penalties, minimum length, grammar, warpers.

Everything is batched over rows, and no operation changes a bit of a row that does not use it, so that a request's
distribution never depends on the other requests of its batch. Order and formulas are those of TGI.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from reference_server.messages import ChooserParameters, Request
from reference_server.model_server.decoding.grammar import GrammarState
from reference_server.model_server.decoding.grammar_rows import GrammarRows
from reference_server.model_server.decoding.host_copy import to_device
from reference_server.model_server.decoding.watermark import Watermark

# Parameters are clamped so that finite logits stay finite in float32.
_TINIEST, _LARGEST = 1e-30, 1e30
_LARGEST_LOGIT = 1e38


@dataclass(frozen=True, slots=True)
class RowParameters:
    """The parameters of one row of the logits, which is a request. prompt_len: its ids before the first output.

    grammar: updated by the sequence as its output grows.
    """

    chooser: ChooserParameters
    prompt_len: int = 0
    min_new_tokens: int = 0
    top_n_tokens: int = 0
    grammar: GrammarState | None = None

    @classmethod
    def of(cls, request: Request, prompt_len: int, grammar: GrammarState | None = None) -> "RowParameters":
        return cls(request.parameters, prompt_len, request.stopping.min_new_tokens, request.top_n_tokens, grammar)


class LogitsPipeline:
    """Watermark, penalties, minimum length, grammars and warpers of one batch.

    Built once for a membership. `process` is called once per step, with the ids of the same sequences in the same
    order.
    """

    def __init__(
        self,
        rows: Sequence[RowParameters],
        vocab_size: int,
        eos_ids: Set[int],
        device: torch.device,
        watermark: Watermark,
    ) -> None:
        choosers = [row.chooser for row in rows]
        self._vocab_size = vocab_size
        self._device = device
        self._watermark = watermark
        self._watermarked = [row for row, chooser in enumerate(choosers) if chooser.watermark]
        self._penalties = self._minimum_length = self._warpers = None
        self._grammars = GrammarRows.of([row.grammar for row in rows], vocab_size, device)
        if any(_is_penalised(chooser) for chooser in choosers):
            self._penalties = Penalties(rows, vocab_size, device)
        if any(row.min_new_tokens > 0 for row in rows):
            self._minimum_length = MinimumLength(rows, vocab_size, eos_ids, device)
        if any(_is_warped(chooser) for chooser in choosers):
            self._warpers = Warpers(choosers, vocab_size, device)
        # All rows are greedy or plainly sampled.
        self.is_identity = not (
            self._watermarked or self._penalties or self._minimum_length or self._grammars or self._warpers
        )

    @property
    def needs_host_ids(self) -> bool:
        """Whether a row's newest id must be read on the host before the next step."""
        return bool(self._watermarked or self._grammars)

    def process(self, logits: Tensor, ids: Sequence[Sequence[int]], newest: Tensor | None) -> Tensor:
        """The final scores, [rows, vocab_size] in float32; filtered ids are at -inf. `logits` is not changed.

        ids: prompt and output of each row, as far as the host knows them. newest: [rows], the one id of every row that
        is on the device only and not in `ids`, or None.
        """
        if self.is_identity:
            return logits.float()
        scores = logits.to(torch.float32, copy=True)
        if self._watermarked:
            assert newest is None, "a watermark needs the newest id on the host"
            for row in self._watermarked:
                green = self._watermark.green_ids(ids[row][-1], self._vocab_size, self._device)
                scores[row, green] += self._watermark.delta
        lengths = [len(row_ids) + (newest is not None) for row_ids in ids]
        if self._penalties:
            self._penalties.apply_(scores, ids, lengths, newest)
        allowed = self._grammars.allowed() if self._grammars else None
        if self._minimum_length:
            # A grammar that allows only the end has priority.
            self._minimum_length.apply_(scores, lengths, self._grammars.ending() if self._grammars else set())
        if self._grammars and allowed is not None:
            self._grammars.apply_(scores, allowed)
        return self._warpers(scores) if self._warpers else scores


class MinimumLength:
    """Filters end-of-sequence ids until a row has `min_new_tokens`."""

    def __init__(self, rows: Sequence[RowParameters], vocab_size: int, eos_ids: Set[int], device: torch.device) -> None:
        eos = sorted(id_ for id_ in eos_ids if 0 <= id_ < vocab_size)
        self._eos = to_device(eos, device)
        # The sequence length at which a row may end.
        self._floors = {
            row: each.prompt_len + each.min_new_tokens
            for row, each in enumerate(rows)
            if eos and each.min_new_tokens > 0
        }
        self._filtered: list[int] = []
        self._filtered_rows = torch.empty(0, 1, dtype=torch.int64, device=device)

    def apply_(self, scores: Tensor, lengths: Sequence[int], ending: Set[int] = frozenset()) -> None:
        """ending: rows that must end now."""
        filtered = [row for row, floor in self._floors.items() if lengths[row] < floor and row not in ending]
        if not filtered:
            return
        if filtered != self._filtered:
            self._filtered = filtered
            self._filtered_rows = to_device(filtered, scores.device)[:, None]
        if len(filtered) == len(scores):
            scores.index_fill_(1, self._eos, -math.inf)
        else:
            scores[self._filtered_rows, self._eos] = -math.inf


class Penalties:
    """Repetition, frequency and presence penalty over each row's own ids."""

    def __init__(self, rows: Sequence[RowParameters], vocab_size: int, device: torch.device) -> None:
        repetition = [_or_off(row.chooser.repetition_penalty, positive=True, off=1.0) for row in rows]
        frequency = [_or_off(row.chooser.frequency_penalty) for row in rows]
        presence = [_or_off(row.chooser.presence_penalty) for row in rows]
        counted = [row for row in range(len(rows)) if repetition[row] != 1 or frequency[row] != 0]
        generated = [row for row in range(len(rows)) if presence[row] != 0]
        self._counted_rows = counted
        self._counted = Occurrences(counted, [0] * len(counted), vocab_size, device)
        self._generated = Occurrences(generated, [rows[row].prompt_len for row in generated], vocab_size, device)
        self._repetition = to_device([repetition[row] for row in counted], device)
        self._frequency = to_device([frequency[row] for row in counted], device)
        self._presence = to_device([presence[row] for row in generated], device)
        self._has_repetition = any(repetition[row] != 1 for row in counted)
        self._has_frequency = any(frequency[row] != 0 for row in counted)
        self._has_presence = bool(generated)

    def apply_(
        self, scores: Tensor, ids: Sequence[Sequence[int]], lengths: Sequence[int], newest: Tensor | None
    ) -> None:
        flat = scores.view(-1)
        if self._counted_rows:
            cells, owners = self._counted.update(ids, newest)
            if self._has_repetition:
                # Several occurrences of one id write the same value to its cell.
                score, penalty = flat[cells], self._repetition[owners]
                penalised = torch.where(score < 0, score * penalty, score / penalty)
                penalised = penalised.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
                flat[cells] = torch.where(score.isinf(), score, penalised)
            if self._has_frequency:
                length = to_device([lengths[row] for row in self._counted_rows], scores.device)
                flat.index_add_(0, cells, (-self._frequency / length)[owners])
        if self._has_presence:
            cells, owners = self._generated.update(ids, newest)
            flat[cells] = flat[cells] - self._presence[owners]


class Occurrences:
    """Every id of some rows from a start position on, as flat cells of [rows, vocab_size].

    Kept on the device and extended in each step by the new ids, so nothing is padded or counted twice.
    """

    def __init__(self, rows: Sequence[int], starts: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self._rows = list(rows)
        self._known = list(starts)
        self._vocab_size = vocab_size
        self._row_index = to_device(self._rows, device, np.int64)
        self._all_owners = torch.arange(len(self._rows), device=device)
        self._size = 0
        self._cells = torch.empty(0, dtype=torch.int64, device=device)
        self._owners = torch.empty(0, dtype=torch.int64, device=device)

    def update(self, ids: Sequence[Sequence[int]], newest: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the new ids; returns the cells, and for each the index of its row in `rows`."""
        fresh: list[np.ndarray] = []
        owners: list[np.ndarray] = []
        for owner, row in enumerate(self._rows):
            if len(ids[row]) > self._known[owner]:
                new = np.asarray(ids[row][self._known[owner] :], dtype=np.int64)
                self._known[owner] = len(ids[row])
                new = new[new < self._vocab_size]
                fresh.append(new + row * self._vocab_size)
                owners.append(np.full(len(new), owner, dtype=np.int64))
        if fresh:
            device = self._cells.device
            self._append(to_device(np.concatenate(fresh), device), to_device(np.concatenate(owners), device))
        if newest is not None:
            self._append(self._row_index * self._vocab_size + newest[self._row_index], self._all_owners)
            self._known = [known + 1 for known in self._known]
        return self._cells[: self._size], self._owners[: self._size]

    def _append(self, cells: Tensor, owners: Tensor) -> None:
        needed = self._size + len(cells)
        if needed > len(self._cells):
            room = torch.empty(2 * needed - self._size, dtype=torch.int64, device=self._cells.device)
            self._cells = torch.cat((self._cells[: self._size], room))
            self._owners = torch.cat((self._owners[: self._size], room))
        self._cells[self._size : needed] = cells
        self._owners[self._size : needed] = owners
        self._size = needed


class Warpers:
    """Temperature, top-k, top-p and typical-p; each changes only the rows that use it."""

    def __init__(self, choosers: Sequence[ChooserParameters], vocab_size: int, device: torch.device) -> None:
        temperatures = [_or_off(chooser.temperature, positive=True, off=1.0) for chooser in choosers]
        self._temperature = _Rows(temperatures, 1.0, device)
        top_k = [min(max(chooser.top_k, 0), vocab_size) for chooser in choosers]
        self._top_k = _Rows(top_k, 0, device)
        self._keep_top_k = partial(keep_top_k, largest_k=max(top_k, default=0))
        self._top_p = _Rows([_mass_or_off(chooser.top_p) for chooser in choosers], 1.0, device)
        self._typical_p = _Rows([_mass_or_off(chooser.typical_p) for chooser in choosers], 1.0, device)

    def __call__(self, scores: Tensor) -> Tensor:
        for rows, warp in (
            (self._temperature, divide_by_temperature),
            (self._top_k, self._keep_top_k),
            (self._top_p, keep_top_p),
            (self._typical_p, keep_typical),
        ):
            if rows.is_everywhere:
                scores = warp(scores, rows.values)
            elif rows:
                scores = scores.index_copy(0, rows.index, warp(scores[rows.index], rows.values))
        return scores


class _Rows:
    """The rows whose value differs from `off`, and those values."""

    def __init__(self, values: Sequence[float], off: float, device: torch.device) -> None:
        active = [row for row, value in enumerate(values) if value != off]
        self._num_active = len(active)
        self.is_everywhere = 0 < len(active) == len(values)
        self.index = to_device(active, device, np.int64)
        self.values = to_device([values[row] for row in active], device)

    def __bool__(self) -> bool:
        return self._num_active > 0


def divide_by_temperature(scores: Tensor, temperature: Tensor) -> Tensor:
    """scores: [rows, vocab]; temperature: [rows]. Shifted to a maximum of 0 first, so that no quotient overflows."""
    return (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]


def keep_top_k(scores: Tensor, k: Tensor, largest_k: int) -> Tensor:
    """Keep the k largest of each row and all equal to the k-th. k: [rows], 1 to `largest_k`."""
    largest = scores.topk(largest_k, dim=-1).values
    kth = largest.gather(1, k[:, None] - 1)
    return scores.masked_fill(scores < kth, -math.inf)


def keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keep the most probable ids whose probabilities reach `top_p`, at least one. top_p: [rows].

    Drops, in ascending order, ids up to a cumulative probability of 1 - top_p; of equal scores the lower ids first, as
    in a stable sort, although only the scores are sorted.
    """
    ascending = _sorted(scores)
    num_dropped = (ascending.softmax(-1).cumsum(-1) <= (1 - top_p)[:, None]).sum(-1, keepdim=True)
    lowest_kept = ascending.gather(1, num_dropped.clamp(max=scores.shape[-1] - 1))
    below = scores < lowest_kept
    tied = scores == lowest_kept
    num_tied_dropped = num_dropped - below.sum(-1, keepdim=True)
    # The best id is the last of its ties, so it is kept even if rounding would drop every id.
    num_tied_dropped = num_tied_dropped.minimum(tied.sum(-1, keepdim=True) - 1)
    return scores.masked_fill(below | (tied & (tied.cumsum(-1) <= num_tied_dropped)), -math.inf)


def _sorted(scores: Tensor) -> Tensor:
    """Each row ascending. numpy's vectorized sort is several times as fast as torch's on a CPU."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    return scores.sort(dim=-1).values


def keep_typical(scores: Tensor, mass: Tensor) -> Tensor:
    """Keep the ids with surprise nearest the entropy, up to `mass` of each row (arXiv 2202.00666). mass: [rows]."""
    log_probs = scores.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(log_probs * probs).nansum(-1, keepdim=True)
    distance = (-log_probs - entropy).abs()
    ascending, order = distance.sort(dim=-1, stable=True)
    num_before = (probs.gather(1, order).cumsum(-1) < mass[:, None]).sum(-1, keepdim=True)
    farthest = ascending.gather(1, num_before.clamp(max=scores.shape[-1] - 1))
    return scores.masked_fill(distance > farthest, -math.inf)


def _is_penalised(chooser: ChooserParameters) -> bool:
    return chooser.repetition_penalty not in (0, 1) or chooser.frequency_penalty != 0 or chooser.presence_penalty != 0


def _is_warped(chooser: ChooserParameters) -> bool:
    return (
        chooser.temperature not in (0, 1)
        or chooser.top_k > 0
        or _mass_or_off(chooser.top_p) != 1
        or _mass_or_off(chooser.typical_p) != 1
    )


def _or_off(value: float, *, positive: bool = False, off: float = 0.0) -> float:
    """`value` clamped to float32's safe range; `off` if it is not a usable number. Zero is always off."""
    if math.isnan(value) or (positive and value <= 0):
        return off
    smallest = _TINIEST if positive else -_LARGEST
    return min(max(value, smallest), _LARGEST)


def _mass_or_off(value: float) -> float:
    """A probability mass between 0 and 1; any other value is off, 1."""
    return value if 0 < value < 1 else 1.0
