"""Instructions of this machine's processor, by which types are chosen."""

import torch

from reference_server.model_server.cpu_kernels import build


def has_bfloat16() -> bool:
    """Whether the processor computes in bfloat16, by AVX-512 BF16 or AMX, so that everything in torch does."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def has_bfloat16_product() -> bool:
    """Whether linears have a compiled product of bfloat16: by AVX-512 BF16, or by AVX2, which widens weights."""
    return hasattr(build.kernels(), "linear")
