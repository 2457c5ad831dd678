"""Layouts of quantized checkpoints: reads the weight of a linear, or a rank's part of it, from its tensors.

Tensors of a linear `P`:

    gptq                P.qweight [inputs * bits / 32, outputs], P.qzeros, P.scales, P.g_idx
    awq                 P.qweight [inputs, outputs * bits / 32], columns of a word interleaved, P.qzeros, P.scales
    fp8                 P.weight in e4m3, P.weight_scale or, for blocks, P.weight_scale_inv
    exl2                P.q_weight, with groups in P.q_groups, P.q_scale, P.q_scale_max, P.q_invperm
    compressed-tensors  P.weight_packed with P.weight_scale (integers), or P.weight in int8 or e4m3 with P.weight_scale
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reference_server.errors import UnsupportedError
from reference_server.model_server.quantization.exl2 import MixedBits, runs_of
from reference_server.model_server.quantization.fp8 import FLOAT8, ScaledFloats, block_size
from reference_server.model_server.quantization.int4 import WORD_BITS, GroupedIntegers, unpack
from reference_server.model_server.quantization.int8 import ScaledIntegers
from reference_server.model_server.quantization.linear import QuantizedWeight
from reference_server.model_server.weights.checkpoint import Checkpoint
from reference_server.model_server.weights.cut import Cut

BITS = (2, 4, 8)
# The nibble of each of the eight columns in an AWQ word.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class GPTQ:
    """`zero_offset`: 1 if `zero - 1` is stored, as by all tools but the newest."""

    bits: int
    zero_offset: int
    name: str = "gptq"
    marks: tuple[str, ...] = ("qweight",)
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")

    def shape(self, checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
        words, outputs = checkpoint.shapes[f"{prefix}.qweight"]
        return outputs, words * WORD_BITS // self.bits

    def read(self, checkpoint: Checkpoint, prefix: str, cut: Cut | None) -> GroupedIntegers:
        inputs = self.shape(checkpoint, prefix)[1]
        transposed = _transposed(cut)
        codes = _unpacked(checkpoint, f"{prefix}.qweight", self.bits, 0, transposed)
        output_cut = transposed if cut is not None and cut.dim == 0 else None
        scales = checkpoint.read(f"{prefix}.scales", output_cut)
        zeros = _unpacked(checkpoint, f"{prefix}.qzeros", self.bits, 1, output_cut)
        input_cut = Cut(0, cut.spans) if cut is not None and cut.dim == 1 else None
        if f"{prefix}.g_idx" in checkpoint.shapes:
            group_of = checkpoint.read(f"{prefix}.g_idx", input_cut).long()
        else:
            group_of = _even_groups(inputs, len(scales), input_cut)
        # Some tools write negative group indexes, which count from the end.
        group_of = group_of % len(scales)
        zeros = (zeros.to(torch.int16) + self.zero_offset) % (1 << self.bits)
        return _grouped(codes.t(), scales.t(), zeros.t().float(), group_of, self.bits)


@dataclass(frozen=True, slots=True)
class AWQ:
    """The GEMM layout."""

    bits: int = 4
    name: str = "awq"
    marks: tuple[str, ...] = ("qweight",)
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")

    def shape(self, checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
        inputs, words = checkpoint.shapes[f"{prefix}.qweight"]
        return words * WORD_BITS // self.bits, inputs

    def read(self, checkpoint: Checkpoint, prefix: str, cut: Cut | None) -> GroupedIntegers:
        inputs = self.shape(checkpoint, prefix)[1]
        transposed = _transposed(cut)
        output_cut = transposed if cut is not None and cut.dim == 0 else None
        codes = self._columns(checkpoint, f"{prefix}.qweight", transposed)
        zeros = self._columns(checkpoint, f"{prefix}.qzeros", output_cut)
        scales = checkpoint.read(f"{prefix}.scales", output_cut)
        input_cut = Cut(0, cut.spans) if cut is not None and cut.dim == 1 else None
        group_of = _even_groups(inputs, len(scales), input_cut)
        return _grouped(codes.t(), scales.t(), zeros.t().float(), group_of, self.bits)

    def _columns(self, checkpoint: Checkpoint, name: str, cut: Cut | None) -> Tensor:
        """[inputs, outputs]. The columns of a word are put in order before the cut is taken."""
        is_columns = cut is not None and cut.dim == 1
        words = None if cut is None or not is_columns else _in_words(cut, WORD_BITS // self.bits)
        read = checkpoint.read(name, words if is_columns else cut)
        codes = unpack(read, self.bits, 1)
        interleaved = codes.view(len(codes), -1, WORD_BITS // self.bits)
        columns = interleaved[..., AWQ_NIBBLES].flatten(1)
        return cut.take(columns) if cut is not None and is_columns and words is None else columns


@dataclass(frozen=True, slots=True)
class EXL2:
    """Each group of inputs has its own number of bits; the inputs are permuted. Cannot be sharded.

    Layout: exllamav2's `pack_tensor.cu` and `q_matrix.cu`, before its kernels shuffle the words.
    """

    bits: float
    name: str = "exl2"
    marks: tuple[str, ...] = ("q_weight",)
    parts: tuple[str, ...] = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm", "q_perm")

    def shape(self, checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
        return checkpoint.shapes[f"{prefix}.q_weight"][1], checkpoint.shapes[f"{prefix}.q_invperm"][0]

    def read(self, checkpoint: Checkpoint, prefix: str, cut: Cut | None) -> MixedBits:
        if cut is not None:
            raise UnsupportedError(f"{prefix}: exl2 weights cannot be sharded: use one shard")
        words, steps, largest, groups, places = (
            checkpoint.read(f"{prefix}.{leaf}")
            for leaf in ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
        )
        # Both are unsigned 16-bit integers, stored as int16.
        order = (places.long() % (1 << 16)).argsort()
        runs = runs_of((groups.long() % (1 << 16)).tolist(), len(words), prefix)
        return MixedBits(words, steps, largest, order, runs)


@dataclass(frozen=True, slots=True)
class Float8:
    """e4m3 with one scale for the weight, for each output or for each block. Scales of inputs are not used."""

    bits: int = 8
    name: str = "fp8"
    marks: tuple[str, ...] = ("weight_scale", "weight_scale_inv")
    parts: tuple[str, ...] = ("weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale")

    def shape(self, checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
        outputs, inputs = checkpoint.shapes[f"{prefix}.weight"]
        return outputs, inputs

    def read(self, checkpoint: Checkpoint, prefix: str, cut: Cut | None) -> QuantizedWeight:
        return _scaled(checkpoint, prefix, cut, self.shape(checkpoint, prefix))


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The tensors of each weight decide its layout; the config only gives the status."""

    bits: int
    name: str = "compressed-tensors"
    marks: tuple[str, ...] = ("weight_scale",)
    parts: tuple[str, ...] = (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
    )

    def shape(self, checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
        if f"{prefix}.weight_packed" in checkpoint.shapes:
            outputs, inputs = checkpoint.read(f"{prefix}.weight_shape").tolist()
        else:
            outputs, inputs = checkpoint.shapes[f"{prefix}.weight"]
        return outputs, inputs

    def read(self, checkpoint: Checkpoint, prefix: str, cut: Cut | None) -> QuantizedWeight:
        shape = self.shape(checkpoint, prefix)
        if f"{prefix}.weight_packed" not in checkpoint.shapes:
            return _scaled(checkpoint, prefix, cut, shape)
        bits = _ct_bits(checkpoint.shapes[f"{prefix}.weight_packed"][1], shape[1])
        if bits not in BITS:
            raise UnsupportedError(f"{prefix}: weights of {bits} bits are not supported: only of 2, 4, 8")
        codes = _unpacked(checkpoint, f"{prefix}.weight_packed", bits, 1, cut)
        if cut is None or cut.dim == 0:
            codes = codes[:, : shape[1]]
        output_cut = cut if cut is not None and cut.dim == 0 else None
        input_cut = Cut(0, cut.spans) if cut is not None and cut.dim == 1 else None
        scales = checkpoint.read(f"{prefix}.weight_scale", output_cut)
        if f"{prefix}.weight_zero_point" in checkpoint.shapes:
            zeros = _unpacked(checkpoint, f"{prefix}.weight_zero_point", bits, 0, output_cut)[: len(scales)].float()
        else:
            zeros = torch.full(scales.shape, float(1 << (bits - 1)))
        if f"{prefix}.weight_g_idx" in checkpoint.shapes:
            group_of = checkpoint.read(f"{prefix}.weight_g_idx", input_cut).long()
        else:
            group_of = _even_groups(shape[1], scales.shape[1], input_cut)
        return _grouped(codes, scales, zeros, group_of, bits)


def _ct_bits(words: int, inputs: int) -> int:
    """The bits per weight that follow from the number of words; the last word may be padded. 0: none."""
    return next((bits for bits in range(1, 9) if -(-inputs * bits // WORD_BITS) == words), 0)


def _scaled(checkpoint: Checkpoint, prefix: str, cut: Cut | None, shape: tuple[int, int]) -> QuantizedWeight:
    """An unpacked eight-bit weight with its scales."""
    values = checkpoint.read(f"{prefix}.weight", cut)
    name = next(name for name in (f"{prefix}.weight_scale", f"{prefix}.weight_scale_inv") if name in checkpoint.shapes)
    scales = checkpoint.read(name).float()
    scales = scales if scales.dim() == 2 else scales.reshape(-1, 1)
    if cut is not None and scales.shape[cut.dim] > 1:
        scales = _scales_of(scales, cut, shape[cut.dim], name)
    if values.dtype == FLOAT8:
        return ScaledFloats(values, scales.contiguous())
    if values.dtype == torch.int8 and scales.shape[1] == 1:
        if f"{prefix}.weight_zero_point" in checkpoint.shapes:
            raise UnsupportedError(f"{prefix}: asymmetric int8 weights are not supported")
        return ScaledIntegers(values, scales[:, 0].expand(len(values)).contiguous())
    raise UnsupportedError(
        f"{prefix}: {values.dtype} weights with scales of shape {tuple(scales.shape)} are not supported"
    )


def _scales_of(scales: Tensor, cut: Cut, size: int, name: str) -> Tensor:
    """The scales of the part `cut` of a dimension of `size` entries, with one scale per entry or per block."""
    blocks = scales.shape[cut.dim]
    part = cut if blocks == size else _in_words(cut, block_size(size, blocks))
    if part is None:
        raise UnsupportedError(f"{name}: its blocks cannot be divided over the shards: use fewer shards")
    return part.take(scales)


def _grouped(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor, bits: int) -> GroupedIntegers:
    """The weight without groups that contain none of these inputs."""
    used, group_of = torch.unique(group_of, return_inverse=True)
    if len(used) < scales.shape[1]:
        scales, zeros = scales[:, used], zeros[:, used]
    return GroupedIntegers(codes.contiguous(), scales.contiguous(), zeros.contiguous(), group_of, bits)


def _even_groups(inputs: int, groups: int, cut: Cut | None) -> Tensor:
    group_of = torch.arange(inputs) // -(-inputs // groups)
    return group_of if cut is None else cut.take(group_of)


def _transposed(cut: Cut | None) -> Cut | None:
    return None if cut is None else Cut(1 - cut.dim, cut.spans)


def _unpacked(checkpoint: Checkpoint, name: str, bits: int, dim: int, cut: Cut | None) -> Tensor:
    """The unpacked integers of a tensor packed along `dim`, or the part `cut` of them."""
    if cut is None or cut.dim != dim:
        return unpack(checkpoint.read(name, cut), bits, dim)
    words = _in_words(cut, WORD_BITS // bits)
    if words is not None:
        return unpack(checkpoint.read(name, words), bits, dim)
    return cut.take(unpack(checkpoint.read(name), bits, dim))


def _in_words(cut: Cut, per_word: int) -> Cut | None:
    """`cut` in words instead of integers; None if a span ends inside of a word."""
    if any(edge % per_word for span in cut.spans for edge in span):
        return None
    return Cut(cut.dim, tuple((start // per_word, end // per_word) for start, end in cut.spans))
