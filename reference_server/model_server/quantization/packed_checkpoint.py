"""A quantized checkpoint with the interface of a plain one: `P.weight` for each linear `P`, and its packed form."""

import torch
from torch import Tensor

from reference_server.model_server.quantization.formats import GPTQ_LABELS, Format, with_stored_bits
from reference_server.model_server.quantization.linear import QuantizedWeight
from reference_server.model_server.weights.checkpoint import Checkpoint
from reference_server.model_server.weights.cut import Cut


class PackedCheckpoint:
    """The interface of `Checkpoint`, and `packed`."""

    def __init__(self, checkpoint: Checkpoint, form: Format) -> None:
        self._checkpoint = checkpoint
        self._format = form = with_stored_bits(form, checkpoint)
        named = [name.rpartition(".") for name in checkpoint.shapes]
        self._prefixes = {prefix for prefix, _, leaf in named if leaf in form.marks}
        self.shapes = {
            name: shape
            for name, shape in checkpoint.shapes.items()
            if not (name.rpartition(".")[0] in self._prefixes and name.rpartition(".")[2] in form.parts)
            and name not in GPTQ_LABELS
        }
        self.shapes |= {f"{prefix}.weight": form.shape(checkpoint, prefix) for prefix in self._prefixes}

    def is_packed(self, name: str) -> bool:
        """Whether `name` is a quantized weight."""
        prefix, _, leaf = name.rpartition(".")
        return leaf == "weight" and prefix in self._prefixes

    def packed(self, name: str, cut: Cut | None) -> QuantizedWeight:
        """A quantized weight, or the part `cut` of its [outputs, inputs]."""
        return self._format.read(self._checkpoint, name.rpartition(".")[0], cut)

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """A tensor on the CPU, or the part `cut` of it; quantized weights are dequantized to float32."""
        if self.is_packed(name):
            whole = self.packed(name, None).dequantize(torch.float32)
            return whole if cut is None else cut.take(whole)
        return self._checkpoint.read(name, cut)

    def is_empty_bias(self, name: str) -> bool:
        """Whether `name` is a bias of zeros: some tools add one to every quantized linear."""
        prefix, _, leaf = name.rpartition(".")
        return leaf == "bias" and prefix in self._prefixes and not bool(self._checkpoint.read(name).any())
