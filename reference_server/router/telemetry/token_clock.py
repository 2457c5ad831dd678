"""The times of a generation's tokens: time to first token, and the time between tokens."""

from reference_server.router.telemetry.metrics import Metrics


class TokenClock:
    """Observes the tokens of one generation, over all its segments. Times are nanoseconds of the batcher's clock."""

    __slots__ = ("_has_token", "_last_ns", "_metrics")

    def __init__(self, metrics: Metrics, arrived_ns: int) -> None:
        self._metrics = metrics
        self._last_ns = arrived_ns
        self._has_token = False

    def on_tokens(self, count: int, now_ns: int) -> None:
        """A step delivered `count` tokens. The gap before a step is divided by its tokens."""
        gap_s = (now_ns - self._last_ns) / 1e9
        self._last_ns = now_ns
        if self._has_token:
            self._metrics.request_inter_token_duration.observe(gap_s / count, times=count)
        else:
            self._metrics.request_first_token_duration.observe(gap_s)
            self._has_token = True
