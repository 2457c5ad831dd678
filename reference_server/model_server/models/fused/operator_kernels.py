"""The Triton kernels of `operators.TritonOperators`. Importing this needs Triton. All addresses are 64-bit."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def add_norm(
    residual, delta, weight, bias, normed, residual_stride, delta_stride, size, epsilon,
    HAS_DELTA: tl.constexpr, HAS_BIAS: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: the sum is rounded to the residual's type and stored there, and its norm is computed from that."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < size
    here = residual + token * residual_stride + place
    hidden = tl.load(here, mask=mask, other=0.0)
    if HAS_DELTA:
        hidden = hidden + tl.load(delta + token * delta_stride + place, mask=mask, other=0.0)
        tl.store(here, hidden, mask=mask)
    wide = hidden.to(tl.float32)
    if CENTERED:
        wide = tl.where(mask, wide - tl.sum(wide, 0) / size, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + epsilon)
    wide = wide * scale * tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        wide += tl.load(bias + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + token * size + place, wide.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def norm_heads(heads, weight, token_stride, head_stride, head_dim, epsilon, BLOCK: tl.constexpr):
    """One head of one token, in place."""
    place = tl.arange(0, BLOCK)
    mask = place < head_dim
    here = heads + tl.program_id(0).to(tl.int64) * token_stride + tl.program_id(1) * head_stride + place
    wide = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / head_dim + epsilon)
    multiplier = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(here, (wide * scale * multiplier).to(heads.dtype.element_ty), mask=mask)


@triton.jit
def rotate(
    heads, table, positions, token_stride, head_stride, num_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """All heads of one token, in place. table: [positions, 2, 2 * half], cosines and then signed sines."""
    token = tl.program_id(0).to(tl.int64)
    row = table + tl.load(positions + token) * 4 * half
    head = tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, HALF)[None, :]
    in_half = place < half
    mask = (head < num_heads) & in_half
    first = heads + token * token_stride + head * head_stride + place
    low = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(first + half, mask=mask, other=0.0).to(tl.float32)
    low_cos = tl.load(row + place, mask=in_half, other=0.0).to(tl.float32)
    high_cos = tl.load(row + half + place, mask=in_half, other=0.0).to(tl.float32)
    low_sin = tl.load(row + 2 * half + place, mask=in_half, other=0.0).to(tl.float32)
    high_sin = tl.load(row + 3 * half + place, mask=in_half, other=0.0).to(tl.float32)
    tl.store(first, (low * low_cos + high * low_sin).to(heads.dtype.element_ty), mask=mask)
    tl.store(first + half, (high * high_cos + low * high_sin).to(heads.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul(gate_up, product, token_stride, size, BLOCK: tl.constexpr):
    """A part of one token's gates and ups."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    gate = tl.load(gate_up + token * token_stride + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * token_stride + size + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(product + token * size + place, (gate * tl.sigmoid(gate) * up).to(product.dtype.element_ty), mask=mask)
