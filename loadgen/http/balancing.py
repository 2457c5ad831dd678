"""Spreads the calls of a load over several replicas of a server."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.dialects.dialect import Dialect
from loadgen.http.call import Client
from loadgen.http.response_reader import ClientCall

LEAST_IN_FLIGHT = "least_in_flight"


@dataclass(slots=True)
class Replicas:
    """Clients of the replicas, in the order of their URLs. A call goes to the next or to the least busy one.

    `first`: the replica of the first call. Workers start at different ones.
    """

    clients: Sequence[Client]
    rule: str = "round_robin"
    first: int = 0
    _started: int = 0
    _in_flight: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._in_flight = [0] * len(self.clients)

    @property
    def dialect(self) -> Dialect:
        return self.clients[0].dialect

    def run(self, body: bytes, call: ClientCall) -> None:
        """Make one call to one replica; see `Client.run`."""
        replica = self._choose()
        if len(self.clients) > 1:
            call.replica = replica
        self._in_flight[replica] += 1
        try:
            self.clients[replica].run(body, call)
        finally:
            self._in_flight[replica] -= 1

    def _choose(self) -> int:
        """The next replica in turn; by the fewest in flight, the first such one in turn."""
        turn = (self.first + self._started) % len(self.clients)
        self._started += 1
        if self.rule != LEAST_IN_FLIGHT:
            return turn
        in_turn = [(turn + step) % len(self.clients) for step in range(len(self.clients))]
        return min(in_turn, key=lambda replica: self._in_flight[replica])
