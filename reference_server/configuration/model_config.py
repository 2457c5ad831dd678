"""Settings of the model: its weights, its memory and its kernels."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from reference_server.configuration.common_config import CommonConfig
from reference_server.configuration.config_fields import FieldSource, Integers, Positive, TrueOrFalse, Tunable

Quantize = Literal[
    "awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "bitsandbytes-nf4",
    "bitsandbytes-fp4", "fp8", "int4",
]  # fmt: skip
Dtype = Literal["float16", "bfloat16", "float32"]
KVCacheDtype = Literal["fp8_e4m3fn", "fp8_e5m2"]
Attention = Literal[
    "auto", "torch", "varlen", "triton", "flash", "paged", "flashdecoding", "flashdecoding-ipex", "flashinfer"
]  # fmt: skip

BITSANDBYTES = ("bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4")
PLAIN_CHOICES = ("none", "eetq", "int4", "fp8", *BITSANDBYTES)
"""Values of `quantize` for a plain checkpoint."""


class ModelConfig(CommonConfig):
    """Model, memory and kernels"""

    model_id: Annotated[str | None, FieldSource()] = Field(
        None, min_length=1, description="Model to serve: hub repository, local directory, or a built-in `preset:NAME`."
    )
    quantize: Annotated[Quantize | None, Tunable(choices=PLAIN_CHOICES, central=True)] = Field(
        None,
        description="Quantization of the weights when they are loaded; it saves memory. Unset: the weights as they are "
        "stored. A checkpoint that is already quantized needs no flag.",
    )
    speculate: Annotated[int | None, Tunable(0, 8)] = Field(
        None,
        ge=0,
        description="Largest number of draft tokens of a request in one decode step, which verifies them. Drafts come "
        "from the heads of a speculator model, or otherwise from n-gram lookup. 0: no drafts. Unset: all heads of a "
        "speculator, otherwise 0.",
    )
    speculate_adaptive: Annotated[bool, FieldSource(takes_value=True, digits=True)] = Field(
        True,
        description="Draft only if it saves time, by the measured time of a step and the number of accepted draft "
        "tokens of a request. false: every draft has --speculate tokens.",
    )
    ngram_rule: Literal["suffix", "tgi"] = Field(
        "suffix",
        description="Rule for drafts without a speculator. suffix: find earlier occurrences of the last 2 to 4 tokens, "
        "and copy the tokens after the longest match, or after the latest of equally long matches. tgi: copy the "
        "tokens after the first occurrence of the last token.",
    )
    dtype: Dtype | None = Field(
        None,
        description="Data type of the computation. Unset: on a GPU the model's own; on a CPU bfloat16 if the processor "
        "has instructions for it (AVX-512 BF16, AMX), with AVX2 also for decoders without images and experts; "
        "otherwise float32.",
    )
    kv_cache_dtype: Annotated[
        KVCacheDtype | None, Tunable(choices=("auto", "fp8_e4m3fn"), when="quantize in ['none', 'fp8']")
    ] = Field(
        None,
        description="Data type of the K/V cache. fp8 holds twice the tokens of a 16-bit type in the same memory, with "
        "less precision; fp8_e4m3fn uses the scales of the checkpoint. Unset: the data type of the computation.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="auto: load the model's weights. dummy: use seeded random weights without a download, to measure "
        "speed only.",
    )
    attention: Attention = Field(
        "auto",
        description="Attention backend, or one of TGI's names for it, which also sets the block size. auto: the "
        "fastest that the device and the model support.",
    )
    prefill_chunking: Annotated[bool, FieldSource(takes_value=True, digits=True), Tunable(central=True)] = Field(
        True,
        description="Split long prompts into chunks that are computed in the same steps as decode, so that running "
        "requests do not pause. If true, --waiting-served-ratio and --max-waiting-tokens have no effect.",
    )
    prefix_caching: Annotated[bool | None, FieldSource(takes_value=True, digits=True)] = Field(
        None,
        description="Keep the K/V of prompts, and reuse it for prompts that begin with the same tokens. Unset: true if "
        "the model and the attention backend support it.",
    )
    run_ahead: Annotated[bool | None, TrueOrFalse] = Field(
        None,
        description="Start a decode step before the router has asked for it, so that the shard does not wait. Unset: "
        "true if the model server supports it.",
    )
    compiled_walk: Annotated[bool, FieldSource(takes_value=True, digits=True)] = Field(
        True,
        description="On a CPU, compute a whole decode step with one compiled operator if the model allows it. false: "
        "use one operator for each layer and operation, to test whether the compiled operator causes an error.",
    )
    cuda_graphs: Annotated[Integers | None, Tunable(choices=("0", "1,2,4,8,16,32"))] = Field(
        None,
        description="Batch sizes for which decode steps are captured as CUDA graphs, which removes launch costs and "
        "takes memory. 0: none. Unset: the model server's own list.",
    )
    cuda_memory_fraction: Annotated[float, Tunable(0.5, 1.0, step=0.01, central=True)] = Field(
        1.0,
        gt=0,
        le=1,
        description="Fraction of the device's memory that the server may use; on a CPU, of --cpu-memory-gib. Lower it "
        "if other programs use the same device.",
    )
    cpu_memory_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Memory for all shards together on a CPU, in GiB. Unset: 4, or half of the free memory if that is "
        "less.",
    )
    compute_threads: Annotated[Positive | None, FieldSource(env=("COMPUTE_THREADS", "OMP_NUM_THREADS"))] = Field(
        None,
        description="Number of threads of a shard on a CPU. Unset: all cores but one, divided by the number of shards.",
    )
    wiggle_room: Annotated[float | None, FieldSource(flag=False, env=("TGI_WIGGLE_ROOM",))] = Field(
        None,
        gt=0,
        lt=1,
        description="Fraction of the memory of --cuda-memory-fraction that weights, activations and K/V cache may fill "
        "on a GPU; the rest is a reserve. Unset: 0.90, and 0.95 where the launcher estimates the prefill that fits.",
    )
    rope_scaling: Literal["linear", "dynamic"] | None = Field(
        None,
        description="Method that extends rotary position embeddings beyond the length that the model was trained with. "
        "Unset: the model's own; linear if --rope-factor is set.",
    )
    rope_factor: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Factor by which --rope-scaling extends that length. Unset: the model's own; 1 if --rope-scaling "
        "is set.",
    )
    watermark_gamma: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="For requests with a watermark: fraction of the vocabulary that the watermark favours.",
    )
    watermark_delta: float = Field(
        2.0,
        allow_inf_nan=False,
        description="For requests with a watermark: value added to the logits of the favoured tokens. A larger value "
        "is easier to detect and changes the text more.",
    )
    enable_prefill_logprobs: Annotated[
        bool, FieldSource(env=("ENABLE_PREFILL_LOGPROBS", "REQUEST_LOGPROBS"), digits=True)
    ] = Field(
        False,
        description="Accept requests for the log probabilities of prompt tokens. They need memory for the logits of a "
        "whole prompt.",
    )
    disable_custom_kernels: bool = Field(
        False,
        description="Compute with the model's own modules instead of fused kernels. Slower; set it to test whether a "
        "kernel causes an error.",
    )

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.dtype is not None and self.quantize is not None and self.quantize not in BITSANDBYTES:
            raise ValueError(f"`dtype` is {self.dtype}, but `quantize` {self.quantize} sets its own: leave one out")
        if self.attention == "paged" and self.prefix_caching:
            raise ValueError("`prefix_caching` does not work with `attention` paged: leave one out")
        return self
