"""Events of the batching loop, for metrics."""

from typing import Protocol

from reference_server.messages import DraftCounts, Timings


class BatchObserver(Protocol):
    """Receives the batching loop's events, on the event loop. `method` is "prefill" or "decode"."""

    def on_queue(self, size: int) -> None:
        """Waiting entries."""
        ...

    def on_batch(self, size: int, reason: str | None, prompt_tokens: int, prefix_hit_tokens: int) -> None:
        """A batch was formed; `reason` (backpressure, wait_exceeded, chunking) is set if it joins a running one."""
        ...

    def on_call(self, method: str) -> None:
        """A step is about to be sent."""
        ...

    def on_call_done(self, method: str, timings: Timings, total_ns: int, filter_ns: int, tokens: int) -> None:
        """A step is done and generated `tokens`; `filter_ns` is the part of `total_ns` after the shard's answer."""
        ...

    def on_call_failed(self, method: str) -> None: ...

    def on_running(self, size: int, max_tokens: int) -> None:
        """Rows of the running batch and the tokens reserved for them; zeros if no batch runs."""
        ...

    def on_blocks(self, free: int, total: int) -> None:
        """K/V blocks on the free list or in the prefix cache, and all blocks that requests can hold."""
        ...

    def on_tokens(self, skipped: int, times: int) -> None:
        """`times` generations of a step had one token and `skipped` more."""
        ...

    def on_drafts(self, drafts: DraftCounts) -> None:
        """A step verified drafts, or tokens were chosen without."""
        ...

    def on_failures(self, err: str, count: int) -> None:
        """`count` requests failed; `err` is `generation`, `dropped`, `overloaded` or `incomplete`."""
        ...


class NullObserver:
    """Ignores every event."""

    def on_queue(self, size: int) -> None: ...

    def on_batch(self, size: int, reason: str | None, prompt_tokens: int, prefix_hit_tokens: int) -> None: ...

    def on_call(self, method: str) -> None: ...

    def on_call_done(self, method: str, timings: Timings, total_ns: int, filter_ns: int, tokens: int) -> None: ...

    def on_call_failed(self, method: str) -> None: ...

    def on_running(self, size: int, max_tokens: int) -> None: ...

    def on_blocks(self, free: int, total: int) -> None: ...

    def on_tokens(self, skipped: int, times: int) -> None: ...

    def on_drafts(self, drafts: DraftCounts) -> None: ...

    def on_failures(self, err: str, count: int) -> None: ...
