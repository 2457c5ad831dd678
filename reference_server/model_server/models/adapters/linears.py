"""The linear layers of a model that adapters may change: names, whole shapes, and this rank's parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from reference_server.model_server.weights.cut import Cut

CONV1D = "Conv1D"


@dataclass(frozen=True, slots=True)
class AdaptableLinear:
    """A linear of the whole model. output_cut, input_cut: this rank's part of its rows or columns; None is all.

    Cuts are of dimension 0 for the rows of B, and of dimension 1 for the columns of A.
    """

    outputs: int
    inputs: int
    output_cut: Cut | None = None
    input_cut: Cut | None = None

    @property
    def own_inputs(self) -> int:
        return self.inputs if self.input_cut is None else self.input_cut.size

    @property
    def own_outputs(self) -> int:
        return self.outputs if self.output_cut is None else self.output_cut.size


def shapes_of(model: Any) -> dict[str, tuple[int, int, bool]]:
    """Outputs, inputs and whether the weight is transposed, by name, before the model is cut.

    Not the output head, and not a router of experts that returns more than its product (PhiMoE).
    """
    head = model.get_output_embeddings()
    found = {}
    for name, module in model.named_modules():
        is_transposed = type(module).__name__ == CONV1D
        if module is not head and (_returns_its_product(module) or is_transposed):
            outputs, inputs = reversed(module.weight.shape) if is_transposed else module.weight.shape
            found[name] = (outputs, inputs, is_transposed)
    return found


def _returns_its_product(module: nn.Module) -> bool:
    # FalconLinear is nn.Linear with the bias added separately.
    return isinstance(module, nn.Linear) and (
        type(module).forward is nn.Linear.forward or type(module).__name__ == "FalconLinear"
    )


def linears_of(shapes: Mapping[str, tuple[int, int, bool]], cuts: Mapping[str, Cut]) -> dict[str, AdaptableLinear]:
    """The linears of a model with the cuts of this rank."""
    linears = {}
    for name, (outputs, inputs, is_transposed) in shapes.items():
        cut = cuts.get(f"{name}.weight")
        linear = AdaptableLinear(outputs, inputs)
        if cut is not None:
            is_by_output = cut.dim == (1 if is_transposed else 0)
            own = Cut(0 if is_by_output else 1, cut.spans, cut.padding)
            linear = AdaptableLinear(outputs, inputs, own if is_by_output else None, None if is_by_output else own)
        linears[name] = linear
    return linears
