"""The replica of each call, by rule."""

from dataclasses import dataclass, field

from loadgen.http.balancing import Replicas
from loadgen.http.response_reader import ClientCall


@dataclass
class NestedClient:
    """A client that makes further calls while its own runs."""

    replicas: list["Replicas"] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def run(self, body: bytes, call: ClientCall) -> None:
        self.calls.append(len(body))
        if len(body) > 1:
            self.replicas[0].run(body[1:], ClientCall())


def replicas(count: int, rule: str, first: int = 0) -> Replicas:
    clients = [NestedClient() for _ in range(count)]
    found = Replicas(clients, rule, first)
    for client in clients:
        client.replicas.append(found)
    return found


def chosen(found: Replicas, times: int) -> list[int | None]:
    calls = [ClientCall() for _ in range(times)]
    for call in calls:
        found.run(b"x", call)
    return [call.replica for call in calls]


def test_servers_6_round_robin_takes_the_replicas_in_turn_from_the_workers_own_first() -> None:
    assert chosen(replicas(3, "round_robin"), 7) == [0, 1, 2, 0, 1, 2, 0]
    assert chosen(replicas(3, "round_robin", first=5), 4) == [2, 0, 1, 2]


def test_servers_6_one_server_has_no_replica_number() -> None:
    assert chosen(replicas(1, "least_in_flight"), 2) == [None, None]


def test_servers_6_least_in_flight_avoids_busy_replicas() -> None:
    found = replicas(3, "least_in_flight")

    found.run(b"x" * 6, ClientCall())

    assert [len(client.calls) for client in found.clients] == [2, 2, 2]
    assert chosen(found, 3) == [0, 1, 2]
