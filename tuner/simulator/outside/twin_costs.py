"""The costs that predict a study's launches, checked against its server and its searched settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.errors import CostModelError
from tuner.servers.find_profile import shipped_profiles
from tuner.servers.tuned_server import TunedServer
from tuner.simulator.fitting.cost_file import Costs, read_costs


def twin_costs(path: Path, server: TunedServer, searched: Sequence[str]) -> tuple[Costs, Mapping[str, str]]:
    """The costs of a file, and the server's meanings of settings.

    Raises CostModelError for costs of another kind or server, or if no searched setting has a meaning.
    """
    costs = read_costs(path)
    if not costs.is_from_clients:
        raise CostModelError(f"{path} is not from client timings: make one with `tgi-tune simulate calibrate --url`")
    engine, kind = costs.of({}).facts.get("engine"), server.build.partition(":")[0]
    if engine in shipped_profiles() and kind in shipped_profiles() and engine != kind:
        raise CostModelError(f"{path} has the costs of a {engine}, but the study's server is {kind}")
    if not any(name in server.meanings for name in searched):
        known = ", ".join(f"`{name}`" for name in server.meanings) or "no setting"
        raise CostModelError(
            f"`cost` cannot help this study: the profile gives {known} a meaning to the simulator, and the study "
            f"searches {', '.join(f'`{name}`' for name in searched)}"
        )
    return costs, server.meanings
