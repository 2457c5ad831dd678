"""A product of the model that adapters add to: `y += scaling * B @ A @ x` for the tokens of each adapter.

Fused products (queries, keys and values; gate and up) have several parts, each with factors of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from reference_server.model_server.models.adapters.linears import AdaptableLinear
from reference_server.model_server.step_state import AdapterSegments, StepState
from reference_server.model_server.weights.adapter import Adapter, Factors

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Update:
    """One part's update: ranks `[first_rank, first_rank + rank)` of A's product, added from output `first_output` on.

    b: [outputs, rank], scaled.
    """

    first_rank: int
    first_output: int
    b: Tensor

    @property
    def ranks(self) -> slice:
        return slice(self.first_rank, self.first_rank + self.b.shape[1])

    @property
    def outputs(self) -> slice:
        return slice(self.first_output, self.first_output + self.b.shape[0])


@dataclass(frozen=True, slots=True)
class SiteFactors:
    """One adapter's factors at a site. a: [sum of the parts' ranks, inputs]."""

    a: Tensor
    updates: tuple[Update, ...]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + sum(update.b.nbytes for update in self.updates)


class AdapterProduct(Protocol):
    """Adds the updates of all adapters of a step to the result of a site's product."""

    name: str

    def stored(self, factors: SiteFactors) -> Any:
        """The factors in the layout of the product, for `put`. Can be called in any thread."""
        ...

    def put(self, site: int, slot: int, stored: Any | None) -> None:
        """Store or remove an adapter's factors at a site. Called between two steps."""
        ...

    def add(self, site: int, segments: AdapterSegments, rows: Tensor, result: Tensor) -> None:
        """rows: [tokens, inputs]; result: [tokens, outputs]."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One linear of a site.

    first_output: its first column in the site's result. order: puts B's rows in the order of the result; None if they
    are.
    """

    name: str
    linear: AdaptableLinear
    first_output: int
    order: Callable[[Tensor], Tensor] | None = None

    def own_factors(self, factors: Factors, scaling: float, like: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's A and scaled B, in the type and on the device of `like`."""
        a = factors.a if self.linear.input_cut is None else self.linear.input_cut.take(factors.a)
        b = factors.b if self.linear.output_cut is None else self.linear.output_cut.take(factors.b)
        b = b.float() * scaling
        if self.order is not None:
            b = self.order(b)
        return a.to(like).contiguous(), b.to(like).contiguous()


class Site:
    """One product of this rank. is_kept: its input has only the tokens that the head needs."""

    def __init__(
        self,
        number: int,
        state: StepState,
        parts: Sequence[Part],
        product: AdapterProduct,
        like: Tensor,
        is_kept: bool,
    ) -> None:
        self.parts = tuple(parts)
        self._number = number
        self._state = state
        self._product = product
        self._like = like
        self._is_kept = is_kept

    def factors_of(self, adapter: Adapter) -> SiteFactors | None:
        """The adapter's factors here; None if it does not change this product."""
        own = [(part, adapter.factors[part.name]) for part in self.parts if part.name in adapter.factors]
        if not own:
            return None
        updates, rows, first_rank = [], [], 0
        for part, factors in own:
            a, b = part.own_factors(factors, adapter.scaling, self._like)
            updates.append(Update(first_rank, part.first_output, b))
            rows.append(a)
            first_rank += len(a)
        return SiteFactors(torch.cat(rows), tuple(updates))

    def stored(self, factors: SiteFactors) -> Any:
        """The factors in the layout of the product, for `put`."""
        return self._product.stored(factors)

    def put(self, slot: int, stored: Any | None) -> None:
        """Set or clear the factors of a slot."""
        self._product.put(self._number, slot, stored)

    def add(self, rows: Tensor, result: Tensor) -> None:
        """Add the updates of the step in progress. rows: [..., inputs]; result: [..., outputs], contiguous."""
        step = self._state.step
        segments = None if step is None else step.kept_adapters if self._is_kept else step.adapters
        if segments is not None:
            inputs, outputs = rows.shape[-1], result.shape[-1]
            self._product.add(self._number, segments, rows.reshape(-1, inputs), result.view(-1, outputs))


class AdaptedLinear:
    """A product with the updates of its site."""

    def __init__(self, linear: Linear, site: Site) -> None:
        self._linear = linear
        self._site = site

    def __call__(self, rows: Tensor) -> Tensor:
        result = self._linear(rows)
        self._site.add(rows, result)
        return result


def adapted(linear: Any, site: Site) -> Linear:
    """The linear with the site's updates, which are added before a sum over ranks."""
    owner = getattr(linear, "__self__", linear)
    if hasattr(owner, "adapt") and getattr(owner, "sums", True):
        owner.adapt = site.add
        whole: Linear = linear
        return whole
    return AdaptedLinear(linear, site)


class Sites:
    """Makes the sites of one model. linears: those that adapters may change, by name."""

    def __init__(
        self, state: StepState, linears: Mapping[str, AdaptableLinear], product: AdapterProduct, like: Tensor
    ) -> None:
        self.all: list[Site] = []
        self.linears = linears
        self.product = product
        self._state = state
        self._like = like

    def at(
        self, names: Sequence[str], *, order: Callable[[Tensor], Tensor] | None = None, is_kept: bool = False
    ) -> Site:
        """The site of these linears, whose results lie side by side."""
        parts, first_output = [], 0
        for name in names:
            parts.append(Part(name, self.linears[name], first_output, order))
            first_output += self.linears[name].own_outputs
        site = Site(len(self.all), self._state, parts, self.product, self._like, is_kept)
        self.all.append(site)
        return site
