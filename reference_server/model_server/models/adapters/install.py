"""Adds adapter sites to the modules of a model that is not fused."""

from typing import Any

from torch import Tensor, nn

from reference_server.model_server.models.adapters.site import Site, Sites


def install(model: Any, sites: Sites) -> None:
    """Give every linear that adapters may change a site of its own."""
    for name in sites.linears:
        module = model.get_submodule(name)
        site = sites.at([name])
        if hasattr(module, "adapt") and getattr(module, "sums", True):
            # The update is added before the result is summed over the ranks.
            module.adapt = site.add
        else:
            module.register_forward_hook(_hook_of(site))


def _hook_of(site: Site) -> Any:
    def add(_module: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> None:
        site.add(inputs[0], result)

    return add
