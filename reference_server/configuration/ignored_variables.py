"""TGI's environment variables without an effect here, each with the reason or the remedy. One warning names those set.

Flags need no table: each of TGI's is a field of a configuration. Not listed are variables that a library reads, such as
`HF_HUB_OFFLINE`, and those whose effect is always on, such as `LOG_COLORIZE=1`.
"""

from collections.abc import Mapping

_ROCM = "there are no kernels for ROCm"
_GPTQ = "GPTQ weights use this server's own kernels"
_SAGEMAKER = "read by `python -m reference_server.launcher.sagemaker`, the entry point for SageMaker"
_CHECKPOINT = "the value comes from the checkpoint's quantization_config"

IGNORED_VARIABLES: Mapping[str, str] = {
    "HF_MODEL_ID": _SAGEMAKER,
    "HF_MODEL_REVISION": _SAGEMAKER,
    "HF_MODEL_QUANTIZE": _SAGEMAKER,
    "HF_MODEL_TRUST_REMOTE_CODE": _SAGEMAKER,
    "SM_NUM_GPUS": _SAGEMAKER,
    "USE_FLASH_ATTENTION": "set `--attention`; auto chooses the fastest available kernel",
    "USE_CUTLASS_W8A8": "fp8 weights have one kernel for each device",
    "EXLLAMA_VERSION": _GPTQ,
    "DISABLE_EXLLAMA": _GPTQ,
    "EXLLAMA_NO_FLASH_ATTN": _GPTQ,
    "HF_KERNELS_CACHE": "no kernels are downloaded",
    "ROCM_USE_FLASH_ATTN_V2_TRITON": _ROCM,
    "ROCM_USE_CUSTOM_PAGED_ATTN": _ROCM,
    "ROCM_USE_SKINNY_GEMM": _ROCM,
    "PYTORCH_TUNABLEOP_SEQLENS": _ROCM,
    "PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP": _ROCM,
    "XPU_MEMORY_FRACTION": "set `--cuda-memory-fraction`",
    # Of earlier releases.
    "FLASH_INFER": "set `--attention flashinfer`",
    "FLASH_DECODING": "set `--attention flashdecoding`",
    "USE_PREFIX_CACHING": "set PREFIX_CACHING",
    "ENABLE_CUDA_GRAPHS": "set `--cuda-graphs`",
    "GPTQ_BITS": _CHECKPOINT,
    "GPTQ_GROUPSIZE": _CHECKPOINT,
}


def ignored_variables(environ: Mapping[str, str]) -> str | None:
    """The warning about variables of `environ` without effect; None without any."""
    found = [f"{name} ({reason})" for name, reason in IGNORED_VARIABLES.items() if environ.get(name)]
    return f"these variables have no effect: {'; '.join(found)}" if found else None


def without_ignored(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process, so that it does not repeat the warning."""
    return {name: value for name, value in environ.items() if name not in IGNORED_VARIABLES}
