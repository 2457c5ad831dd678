"""The options of the Scheduler, and the admission policy that follows from them."""

from dataclasses import dataclass
from enum import StrEnum

from reference_server.router.scheduling.admission import (
    Admission,
    PagedAdmission,
    TokenBudget,
    padded_admission,
    rounded_admission,
)
from reference_server.router.scheduling.blocks import FreeListAllocator
from reference_server.router.scheduling.radix import RadixAllocator


class WireVersion(StrEnum):
    """The version of the protocol, which decides who places K/V: the router (v3) or the shard (v2)."""

    V3 = "v3"
    V2 = "v2"


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Settings and model properties that the Scheduler needs."""

    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    waiting_served_ratio: float = 1.2
    max_waiting_tokens: int = 20
    max_batch_size: int | None = None
    requires_padding: bool = False
    supports_chunking: bool = False
    block_size: int = 16
    use_prefix_caching: bool = False
    window_size: int | None = None
    speculate: int = 0
    schema: WireVersion = WireVersion.V3
    adapters: tuple[str, ...] = ()

    @property
    def chunks_prefills(self) -> bool:
        return self.supports_chunking and not self.requires_padding and self.schema is WireVersion.V3

    @property
    def limits(self) -> TokenBudget:
        return TokenBudget(self.max_batch_prefill_tokens, self.max_batch_total_tokens)


def make_admission(options: SchedulerOptions) -> Admission:
    """The admission policy for this model and wire schema."""
    block_size, speculate = options.block_size, options.speculate
    if options.requires_padding:
        return padded_admission(options.limits, block_size=block_size, speculate=speculate)
    if options.schema is WireVersion.V2:
        return rounded_admission(
            options.limits, block_size=block_size, window_size=options.window_size, speculate=speculate
        )
    return PagedAdmission(
        options.limits,
        RadixAllocator(options.max_batch_total_tokens, block_size)
        if options.use_prefix_caching
        else FreeListAllocator(options.max_batch_total_tokens, block_size, options.window_size),
        block_size=block_size,
        speculate=speculate,
        supports_chunking=options.supports_chunking,
        adapters=options.adapters,
    )
