"""Reads the cost file of a study and checks that it applies to the study's server and searched settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.errors import CostModelError
from tuner.servers.find_profile import shipped_profiles
from tuner.servers.tuned_server import TunedServer
from tuner.simulator.fitting.cost_file import Costs, read_costs


def twin_costs(path: Path, server: TunedServer, searched: Sequence[str]) -> tuple[Costs, Mapping[str, str]]:
    """The costs of a file, and the server's `meanings`.

    Raises CostModelError for costs of another kind or of another server, and if no searched setting has a meaning.
    """
    costs = read_costs(path)
    if not costs.is_from_clients:
        raise CostModelError(f"{path} is not from client timings: create it with `tgi-tune simulate calibrate --url`")
    engine, kind = costs.of({}).facts.get("engine"), server.build.partition(":")[0]
    if engine in shipped_profiles() and kind in shipped_profiles() and engine != kind:
        raise CostModelError(f"{path} has the costs of {engine}, but the study's server is {kind}")
    if not any(name in server.meanings for name in searched):
        known = ", ".join(f"`{name}`" for name in server.meanings) or "no setting"
        raise CostModelError(
            f"`cost` has no effect on this study: the simulator predicts {known} of the profile, but the study "
            f"searches {', '.join(f'`{name}`' for name in searched)}"
        )
    return costs, server.meanings
