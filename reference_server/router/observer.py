"""What the batching loop tells about itself. Metrics listen; by default nobody does."""

from typing import Protocol

from reference_server.messages import Timings


class BatchObserver(Protocol):
    """Told what happens, for metrics; `method` is "prefill" or "decode". Calls are made on the event loop."""

    def on_queue(self, size: int) -> None:
        """Entries that wait now."""
        ...

    def on_batch(self, size: int, reason: str | None, prompt_tokens: int, prefix_hit_tokens: int) -> None:
        """A batch was formed; `reason` (backpressure, wait_exceeded, chunking) if it joins a running one."""
        ...

    def on_call(self, method: str) -> None:
        """A step is about to be asked for."""
        ...

    def on_call_done(self, method: str, timings: Timings, total_ns: int, filter_ns: int) -> None:
        """A step was answered; `total_ns` is the whole, `filter_ns` its part after the shard's answer."""
        ...

    def on_call_failed(self, method: str) -> None: ...

    def on_running(self, size: int, max_tokens: int) -> None:
        """Rows of the running batch and the tokens reserved for them; zeros when nothing runs."""
        ...

    def on_tokens(self, skipped: int, times: int) -> None:
        """`times` generations of a step brought one token and `skipped` more."""
        ...

    def on_failures(self, err: str, count: int) -> None:
        """Requests ended as `generation`, `dropped` or `incomplete`."""
        ...


class NullObserver:
    """Takes no notice."""

    def on_queue(self, size: int) -> None: ...

    def on_batch(self, size: int, reason: str | None, prompt_tokens: int, prefix_hit_tokens: int) -> None: ...

    def on_call(self, method: str) -> None: ...

    def on_call_done(self, method: str, timings: Timings, total_ns: int, filter_ns: int) -> None: ...

    def on_call_failed(self, method: str) -> None: ...

    def on_running(self, size: int, max_tokens: int) -> None: ...

    def on_tokens(self, skipped: int, times: int) -> None: ...

    def on_failures(self, err: str, count: int) -> None: ...
