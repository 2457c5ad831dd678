"""A cost file: one fitted model for each `quantize` value, and the servers on which they were measured.

A file written by hand can have a single model. Outputs then note that the costs are not measured.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tuner.errors import CostModelError, NotSimulatedError
from tuner.simulator.fitting.cache_cost import fit_factor, with_keys_scaled
from tuner.simulator.fitting.client_cost import NO_COST, ClientCost
from tuner.simulator.fitting.cost_model import FORMAT, CostModel, StepErrors
from tuner.simulator.fitting.fit_steps import SUMMED, fit, rescaled
from tuner.simulator.fitting.traced_steps import TracedSteps, joined, without_first_of_shape
from tuner.simulator.simulated_server import KvPool, SimulatedServer, has_float8_cache, scheme_of

COST_FILE = "cost.json"
UNKNOWN_RANGES = (
    "the cost file has no `ranges`, the sizes of the measured steps: run the study or `tgi-tune simulate fit` again"
)
FEWEST_DECODES = 20
# Largest median errors of usable predictions: of sums of held-out steps by phase, and of held-out loads by metric.
USABLE_ERRORS = {"prefill": 0.2, "decode": 0.2, "throughput": 0.15, "tpot": 0.15, "ttft": 0.3}
# The same for steps of about one size. Above it, loads with other batch sizes than the measured ones are not predicted.
USABLE_SIZES = 0.5
# Above these, the output states the error: of sums of held-out steps, and of equal steps.
GOOD_ERRORS = {"prefill": 0.08, "decode": 0.08}


@dataclass(frozen=True, slots=True)
class Costs:
    """The content of a cost file.

    models: by value of `quantize`. servers: measured launches; the first is the reference. client: time of a request
    outside model steps. float8_keys: factor on the time of cached keys with an eight-bit K/V cache; None without
    launches of both kinds.
    """

    models: Mapping[str, CostModel]
    servers: tuple[SimulatedServer, ...] = ()
    client: ClientCost = NO_COST
    float8_keys: float | None = None

    def of(self, settings: Mapping[str, Any]) -> CostModel:
        """The model of a configuration. Raises NotSimulatedError if its `quantize` was not measured."""
        scheme = scheme_of(settings)
        if scheme not in self.models:
            raise NotSimulatedError(
                f"`quantize` {scheme} was not measured: the cost file has only {', '.join(self.models)}"
            )
        model = self.models[scheme]
        if self.float8_keys is None or not has_float8_cache(settings):
            return model
        return with_keys_scaled(model, self.float8_keys)

    def only(self, settings: Mapping[str, Any]) -> "Costs":
        """The costs with only the model of a configuration, so that only its errors count. Raises NotSimulatedError."""
        self.of(settings)
        scheme = scheme_of(settings)
        return replace(self, models={scheme: self.models[scheme]})

    @property
    def reference(self) -> SimulatedServer:
        if not self.servers:
            raise NotSimulatedError(
                "the cost file has no server: set max_batch_prefill_tokens and max_batch_total_tokens with --set"
            )
        return self.servers[0]

    @property
    def pool(self) -> KvPool | None:
        has_pool = bool(self.servers) and not self.reference.has_slots
        return KvPool.of(self.servers) if has_pool else None

    @property
    def is_measured(self) -> bool:
        return all(model.is_measured for model in self.models.values())

    @property
    def problem(self) -> str | None:
        """A sentence on a held-out error that is too large, or on unknown ranges; None if predictions are usable."""
        if any(model.lacks_ranges for model in self.models.values()):
            return UNKNOWN_RANGES
        for errors in self._errors:
            for name in errors.median:
                error, most = errors.of_prediction(name), USABLE_ERRORS.get(name, math.inf)
                if error > most:
                    return f"the median error of held-out {_of_what(errors, name)} is {error:.1%}, above {most:.0%}"
                if errors.sizes.get(name, 0.0) > USABLE_SIZES:
                    return (
                        f"held-out {name} steps of one size are predicted with an error of {errors.sizes[name]:.0%}, "
                        f"above {USABLE_SIZES:.0%}"
                    )
        return None

    @property
    def noise(self) -> str | None:
        """A warning about inaccurate predictions or differences between equal steps; None if both are small."""
        spreads = self._above_good(lambda errors, name: errors.spread.get(name, 0.0))
        errors = self._above_good(lambda errors, name: errors.sums.get(name, 0.0))
        busy = f"the machine was busy during the measurement: equal steps differ by {spreads} in the median"
        sizes = self._above_good(lambda errors, name: errors.sizes.get(name, 0.0))
        off = f"sums of held-out steps are predicted with a median error of {errors}: expect this error in predictions"
        off += f", and up to {sizes} at single batch sizes" if sizes else ""
        return "; ".join(filter(None, (spreads and busy, errors and off))) or None

    def _above_good(self, error_of: Callable[[StepErrors, str], float]) -> str:
        """The largest error of all models for each phase in which it exceeds `GOOD_ERRORS`."""
        largest = {
            name: max((error_of(errors, name) for errors in self._errors if name in errors.median), default=0.0)
            for name in GOOD_ERRORS
        }
        return " and ".join(f"{error:.0%} ({name})" for name, error in largest.items() if error > GOOD_ERRORS[name])

    def with_errors(self) -> "Costs":
        """The costs with step times increased by the expected error of a prediction."""
        return replace(self, models={scheme: model.with_error() for scheme, model in self.models.items()})

    @property
    def error(self) -> str | None:
        """A sentence on the median held-out errors, the largest of all models; None if they are unknown."""
        names = list(dict.fromkeys(name for errors in self._errors for name in errors.median))
        if not names:
            return None
        largest = {name: max(errors.median.get(name, 0.0) for errors in self._errors) for name in names}
        unit = "loads" if self.is_from_clients else "steps"
        shown = ", ".join(f"{name} {error:.1%}" for name, error in largest.items())
        return f"The median error of the cost model on held-out {unit}: {shown}.".replace("%", " %")

    @property
    def _errors(self) -> list[StepErrors]:
        return [model.errors for model in self.models.values() if model.errors is not None]

    @property
    def is_poor(self) -> bool:
        return self.problem is not None

    @property
    def is_from_clients(self) -> bool:
        """Whether a model was fitted to client timings."""
        return any(model.is_from_clients for model in self.models.values())

    @property
    def is_from_metrics(self) -> bool:
        """Whether a model was fitted to sums over intervals of the server's metrics."""
        return any(model.is_from_metrics for model in self.models.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "client_ns": self.client.client_ns,
            "tokenize_ns": self.client.tokenize_ns,
            "added_tokens": self.client.added_tokens,
            "float8_keys": self.float8_keys,
            "models": {scheme: model.to_json() for scheme, model in self.models.items()},
            "servers": [asdict(each) for each in self.servers],
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=2, default=str) + "\n")


def _of_what(errors: StepErrors, name: str) -> str:
    return f"{name}, in sums of {SUMMED} steps," if name in errors.sums else name


def read_costs(path: Path) -> Costs:
    """The costs of a file. Raises CostModelError."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if "models" not in row:
            return Costs({"none": CostModel.from_json(row)})
        models = {str(scheme): CostModel.from_json(each) for scheme, each in row["models"].items()}
        servers = tuple(
            SimulatedServer(each["options"], each["settings"], each.get("memory", {}), each.get("device"))
            for each in row["servers"]
        )
        times = (int(row.get(name, 0)) for name in ("client_ns", "tokenize_ns", "added_tokens"))
        client = ClientCost(*times)
        float8_keys = None if row.get("float8_keys") is None else float(row["float8_keys"])
    except OSError as error:
        raise CostModelError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CostModelError(f"{path}: not a cost file ({error!r})") from None
    except CostModelError as error:
        raise CostModelError(f"{path}: {error}") from None
    return Costs(models, servers, client, float8_keys)


def fit_costs(
    launches: Sequence[TracedSteps], clients: Sequence[ClientCost] = (), *, with_intervals: bool = True
) -> Costs:
    """Fit one model for each `quantize` value and rescale it to all its steps. Raises CostModelError.

    Launches with an eight-bit K/V cache determine the factor of its keys. A `quantize` value is fitted to them only if
    it has no other launches.
    clients: client costs of the launches. with_intervals: compute bootstrap intervals of the coefficients.
    """
    servers = [SimulatedServer.of(steps.facts) for steps in launches]
    by_scheme: dict[str, list[TracedSteps]] = {}
    float8: dict[str, list[TracedSteps]] = {}
    for server, steps in zip(servers, launches, strict=True):
        group = float8 if has_float8_cache(server.settings) else by_scheme
        group.setdefault(scheme_of(server.settings), []).append(_warm(steps))

    def fitted(warm: list[TracedSteps]) -> CostModel:
        model = fit(warm, graph_sizes=_graph_sizes(servers[0]), with_intervals=with_intervals)
        return rescaled(model, joined(warm))

    models = {scheme: fitted(warm) for scheme, warm in by_scheme.items()}
    factor = fit_factor(
        (models[scheme], steps) for scheme, group in float8.items() if scheme in models for steps in group
    )
    for scheme in float8.keys() - models.keys():
        of_float8 = fitted(float8[scheme])
        models[scheme] = with_keys_scaled(of_float8, 1 / factor) if factor else of_float8
    return Costs(models, tuple(servers), ClientCost.mean(clients), factor)


def _warm(steps: TracedSteps) -> TracedSteps:
    """Steps without the first step of each shape, if enough remain. Sums over intervals are not changed."""
    if steps.is_from_metrics:
        return steps
    kept = without_first_of_shape(steps)
    return kept if len(kept) >= FEWEST_DECODES else steps


def _graph_sizes(server: SimulatedServer) -> tuple[int, ...]:
    """The captured batch sizes of the settings."""
    text = server.settings.get("cuda_graphs")
    sizes = text if isinstance(text, list) else str(text or "").split(",")
    return tuple(sorted(int(size) for size in sizes if str(size).strip().isdigit() and int(size) > 0))
