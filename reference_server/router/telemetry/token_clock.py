"""The times of a generation's tokens: time to first token, and the time between tokens."""

from reference_server.router.telemetry.metrics import Metrics


class TokenClock:
    """Observes the tokens of one generation, over all its segments. Times are nanoseconds of the batcher's clock."""

    __slots__ = ("_last_ns", "_metrics", "arrived_ns", "first_token_ns")

    def __init__(self, metrics: Metrics, arrived_ns: int) -> None:
        self.arrived_ns = arrived_ns
        self.first_token_ns: int | None = None
        self._metrics = metrics
        self._last_ns = arrived_ns

    def on_tokens(self, count: int, now_ns: int) -> None:
        """A step delivered `count` tokens. The gap before a step is divided by its tokens."""
        gap_s = (now_ns - self._last_ns) / 1e9
        self._last_ns = now_ns
        if self.first_token_ns is not None:
            self._metrics.request_inter_token_duration.observe(gap_s / count, times=count)
        else:
            self._metrics.request_first_token_duration.observe(gap_s)
            self.first_token_ns = now_ns
