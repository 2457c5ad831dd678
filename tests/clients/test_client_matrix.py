"""Unmodified clients, each in an environment of its own, against a launched server."""

from collections.abc import Callable, Iterator

import pytest

from reference_server.presets.catalog import find
from tests.clients.matrix import Client, Outcome, load_clients, run_client
from tests.support.clients.client_environments import IndexUnreachableError, environment_for
from tests.support.servers.launched_server import Server, serve

pytestmark = [pytest.mark.clients, pytest.mark.network, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Without this flag no response holds the tokens of its prompt.
    with serve("--enable-prefill-logprobs") as server:
        yield server


@pytest.mark.parametrize("client", load_clients(), ids=lambda client: client.name)
def test_every_feature_of_a_client_passes(client: Client, server: Server, keep: Callable[[Outcome], None]):
    try:
        environment = environment_for(client.name, client.requirements)
    except IndexUnreachableError as error:
        pytest.skip(f"{client.name} cannot be installed: {error}")
    preset = find("preset:tiny-llama")
    assert preset is not None

    outcome = run_client(client, environment, server.url, preset.tokenizer_directory)
    keep(outcome)

    assert sorted(outcome.failures) == sorted(client.features)
    failed = {feature: detail for feature, detail in outcome.failures.items() if detail}
    assert not failed, "\n".join(f"{client.name}, {feature}:\n{detail}" for feature, detail in failed.items())
