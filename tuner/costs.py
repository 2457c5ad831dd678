"""A cost file: one fitted model per `quantize` value, and the launches they were measured on.

A file made by hand may hold one model alone; then every output says that nothing was measured.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.clientcost import NO_COST, ClientCost
from tuner.costmodel import FORMAT, CostModel, CostModelError, anchored, fit
from tuner.forecast import ForecastError, Pool, Server
from tuner.steptrace import Steps, joined, without_first_of_shape

FEWEST_DECODES = 20
# Median errors of held-out steps beyond which predictions are refused.
USABLE_STEP_ERROR = 0.08


@dataclass(frozen=True, slots=True)
class Costs:
    """`models` by `quantize`; `servers` are the launches behind them, the first one the reference.

    `client` is what a request costs beside the steps.
    """

    models: Mapping[str, CostModel]
    servers: tuple[Server, ...] = ()
    client: ClientCost = NO_COST

    def of(self, settings: Mapping[str, Any]) -> CostModel:
        """The model of a configuration. Raises ForecastError where its `quantize` was not measured."""
        scheme = str(settings.get("quantize") or "none")
        if scheme not in self.models:
            raise ForecastError(f"`quantize` {scheme} was not measured; the cost file has {', '.join(self.models)}")
        return self.models[scheme]

    @property
    def reference(self) -> Server:
        if not self.servers:
            raise ForecastError(
                "the cost file has no server: give max_batch_prefill_tokens and max_batch_total_tokens with --set"
            )
        return self.servers[0]

    @property
    def pool(self) -> Pool | None:
        return Pool.of(self.servers) if self.servers else None

    @property
    def is_measured(self) -> bool:
        return all(model.is_measured for model in self.models.values())

    @property
    def is_poor(self) -> bool:
        """Whether the models miss steps they had not seen by more than is usable."""
        errors = [model.errors for model in self.models.values() if model.errors is not None]
        return any(median > USABLE_STEP_ERROR for each in errors for median in each.median.values())

    @property
    def is_from_metrics(self) -> bool:
        """Whether a model knows sums over intervals only, not steps."""
        return any(model.is_from_metrics for model in self.models.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "client_ns": self.client.client_ns,
            "tokenize_ns": self.client.tokenize_ns,
            "models": {scheme: model.to_json() for scheme, model in self.models.items()},
            "servers": [
                {"options": each.options, "settings": each.settings, "memory": each.memory} for each in self.servers
            ],
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=2, default=str) + "\n")


def read_costs(path: Path) -> Costs:
    """The costs of a file. Raises CostModelError."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if "models" not in row:
            return Costs({"none": CostModel.from_json(row)})
        models = {str(scheme): CostModel.from_json(each) for scheme, each in row["models"].items()}
        servers = tuple(Server(each["options"], each["settings"], each.get("memory", {})) for each in row["servers"])
        client = ClientCost(int(row.get("client_ns", 0)), int(row.get("tokenize_ns", 0)))
    except OSError as error:
        raise CostModelError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CostModelError(f"{path}: not a cost file ({error!r})") from None
    except CostModelError as error:
        raise CostModelError(f"{path}: {error}") from None
    return Costs(models, servers, client)


def fit_costs(launches: Sequence[Steps], clients: Sequence[ClientCost] = (), *, with_intervals: bool = True) -> Costs:
    """One model per `quantize` of the launches, each with the level of all its steps. Raises CostModelError."""
    by_scheme: dict[str, list[Steps]] = {}
    servers = []
    for steps in launches:
        server = Server.of(steps.facts)
        servers.append(server)
        by_scheme.setdefault(str(server.settings.get("quantize") or "none"), []).append(steps)
    models = {}
    for scheme, group in by_scheme.items():
        warm = list(map(_warm, group))
        model = fit(warm, graph_sizes=_graph_sizes(servers[0]), with_intervals=with_intervals)
        models[scheme] = anchored(model, joined(warm))
    return Costs(models, tuple(servers), ClientCost.mean(clients))


def _warm(steps: Steps) -> Steps:
    """Without the first step of each shape, where enough are left; sums over intervals as they are."""
    if steps.is_from_metrics:
        return steps
    kept = without_first_of_shape(steps)
    return kept if len(kept) >= FEWEST_DECODES else steps


def _graph_sizes(server: Server) -> tuple[int, ...]:
    """The captured batch sizes that the settings name."""
    text = server.settings.get("cuda_graphs")
    sizes = text if isinstance(text, list) else str(text or "").split(",")
    return tuple(sorted(int(size) for size in sizes if str(size).strip().isdigit() and int(size) > 0))
