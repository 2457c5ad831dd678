"""The load of one point of a sweep or a search: its amount, its time, and its own stream of requests."""

import hashlib
from dataclasses import dataclass

from loadgen.capacity.point_time import PointTime
from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import NO_SALT


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a series: `amount` users or requests/s. extension: earlier runs of the same amount.

    needed: independent requests after which the run ends.
    """

    quantity: str
    amount: float
    extension: int = 0
    needed: int = 1

    @property
    def name(self) -> str:
        """`rate-2.5`, `concurrency-8-again1`: the directory of the run."""
        return f"{self.quantity}-{self.amount:g}" + (f"-again{self.extension}" if self.extension else "")

    def load(self, series: BenchConfig, time: PointTime, *, shares_stream: bool) -> BenchConfig:
        """The load of the point.

        shares_stream: lengths and arrivals are those of the other points, as in a sweep. Texts differ in any case.
        """
        is_whole = self.quantity == "concurrency"
        changes: dict[str, object] = {
            self.quantity: round(self.amount) if is_whole else self.amount,
            "label": series.label or f"{self.quantity} {self.amount:g}",
        }
        if not shares_stream:
            changes["seed"] = self._seed(series.seed)
        if series.salt not in (None, NO_SALT):
            changes["salt"] = f"{series.salt}:{self.name}"
        if series.is_open_loop and not shares_stream:
            changes["stop_on_overload"] = True
        if series.requests is None:
            changes |= {"duration": time.most_s, "least_duration": time.least_s, "independent_requests": self.needed}
        return BenchConfig.model_validate(series.model_dump() | changes)

    def _seed(self, seed: int) -> int:
        digest = hashlib.sha256(f"{seed}:{self.name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1
