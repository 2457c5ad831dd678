"""Prepares a loaded model for its tier: hooks and fuses it, or wraps and tries it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from reference_server.errors import UnsupportedError
from reference_server.model_server.attention.kernel import AttentionNeeds
from reference_server.model_server.attention.select import AttentionChoice, choose
from reference_server.model_server.forward.cuda_graph import CudaGraphs, GraphedForward, refuse_graphs
from reference_server.model_server.forward.encoder_decoder import EncoderDecoderForward
from reference_server.model_server.forward.inputs import Forward
from reference_server.model_server.forward.long_rope import RecomputingForward
from reference_server.model_server.forward.padded import PaddedForward
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.forward.recurrent import RecurrentForward
from reference_server.model_server.forward.self_check import distance_from_alone, limit_of
from reference_server.model_server.memory.kv_cache import KVScales, LayerShape
from reference_server.model_server.models import hooks, rotary
from reference_server.model_server.models.adapters.install import install
from reference_server.model_server.models.adapters.products import product_for
from reference_server.model_server.models.adapters.site import Sites
from reference_server.model_server.models.adapters.slots import AdapterLimits, AdapterSlots
from reference_server.model_server.models.fused import fuse
from reference_server.model_server.models.fused.compiled_walk import Undescribed
from reference_server.model_server.models.fused.packed_linear import pack_linears
from reference_server.model_server.models.fused.swap import swap_modules
from reference_server.model_server.models.loader import LoadedModel
from reference_server.model_server.options import EngineOptions, Tier
from reference_server.model_server.step_state import StepState
from reference_server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A forward, the K/V geometry of its cache, and the facts that the server reports.

    cache_dtype, scales: of the elements of the cache, and of each layer; without scales, empty.
    added_bytes: memory that fusing adds to the weights. start_id: the first token of a decoder behind an encoder.
    graphs: the forward, if its decode steps can be captured. head: the output head of a ragged model, hidden states to
    logits. longest_prefix: the longest request whose K/V does not depend on its length; None without such a limit.
    adapters: None if the server has none.
    """

    tier: Tier
    forward: Forward
    shapes: tuple[LayerShape, ...]
    choice: AttentionChoice
    cache_dtype: torch.dtype
    scales: tuple[KVScales, ...] = ()
    kernels: str = "modules"
    quantize: str = "none"
    added_bytes: int = 0
    start_id: int | None = None
    graphs: GraphedForward | None = None
    head: Callable[[Tensor], Tensor] | None = None
    longest_prefix: int | None = None
    adapters: AdapterSlots | None = None

    @property
    def requires_padding(self) -> bool:
        return self.tier != "ragged"

    @property
    def backends(self) -> dict[str, str]:
        own = self.requires_padding
        return {
            "prefill": "transformers" if own else self.choice.prefill.name,
            "decode": "transformers" if own else self.choice.decode.name,
            "reason": f"the {self.tier} tier runs the model's own modules" if own else self.choice.reason,
            "kernels": self.kernels,
            "quantize": self.quantize,
            "kv_cache": str(self.cache_dtype).removeprefix("torch."),
        }

    def tokens_kept(self, prompt_len: int, max_new_tokens: int) -> int:
        """Tokens whose K/V a request of maximum length needs."""
        # The last generated token is not an input; a decoder behind an encoder has a start token in addition.
        return prompt_len + max_new_tokens - (0 if self.tier == "encoder_decoder" else 1)


def prepare_model(loaded: LoadedModel, options: EngineOptions, tokenizer: Tokenizer, state: StepState) -> PreparedModel:
    """The forward of a model; raises UnsupportedError, naming the class, for a model that it would compute wrongly."""
    if options.has_adapters and (options.tier or loaded.family.tier) != "ragged":
        tier = (options.tier or loaded.family.tier).replace("_", "-")
        raise UnsupportedError(
            f"`--lora-adapters` cannot be served with {type(loaded.model).__name__}: the {tier} tier adds no adapters; "
            "set --model-id to one adapter, which is merged into its base model"
        )
    prepared = _prepare(loaded, options, tokenizer, state)
    if loaded.quantization is None:
        return prepared
    kernels = ",".join([prepared.kernels, *loaded.kernels])
    return replace(prepared, kernels=kernels, quantize=loaded.quantization.scheme.name)


def _prepare(loaded: LoadedModel, options: EngineOptions, tokenizer: Tokenizer, state: StepState) -> PreparedModel:
    tier = options.tier or loaded.family.tier
    if tier == "ragged":
        return _ragged(loaded, options, state)
    try:
        match tier:
            case "padded":
                prepared = _padded(loaded, options, tokenizer, state)
            case "encoder_decoder":
                prepared = _encoder_decoder(loaded, options, tokenizer, state)
            case "recurrent":
                prepared = _recurrent(loaded, options, tokenizer, state)
    except UnsupportedError:
        raise
    except ValueError as error:
        raise _refusal(loaded, str(error)) from error
    except Exception as error:  # of the model's own code
        raise _refusal(loaded, f"its forward failed with {type(error).__name__}: {error}") from error
    return prepared


def _ragged(loaded: LoadedModel, options: EngineOptions, state: StepState) -> PreparedModel:
    rotary.install(loaded.model, state, options.prefix_caching)
    layers = hooks.probe(loaded.model)
    choice = choose(options, hooks.needs_of(layers, loaded.device, loaded.dtype, loaded.cache.float8))
    hooks.attach(layers, state, choice)
    added_bytes = 0
    has_grid = loaded.vision is not None and loaded.vision.has_grid
    # The walk rotates by one position a token.
    decoder = fuse.fuse(loaded.model) if options.fuse and not has_grid else None
    if decoder is not None:
        decoder.kept = state.hidden
        added_bytes = decoder.added_bytes
    elif options.fuse:
        swap_modules(loaded.model)
        added_bytes = pack_linears(loaded.model, tied=loaded.model.get_input_embeddings().weight)
    adapters = _adapters(loaded, options, state, decoder) if options.has_adapters else None
    kernels = "modules" if decoder is None else _with_walk(decoder, options)
    forward = RaggedForward(loaded.model, state, loaded.device, decoder)
    graphs = _graphed(forward, loaded, choice, options)
    own = graphs or forward
    original = rotary.original_maximum(loaded.model)
    return PreparedModel(
        tier="ragged",
        forward=own if original is None else RecomputingForward(own, original, choice.block_size),
        shapes=tuple(layer.shape for layer in layers),
        choice=choice,
        cache_dtype=loaded.cache.dtype(loaded.dtype),
        scales=loaded.cache.scales_in_order(layer.module for layer in layers),
        kernels=kernels,
        added_bytes=added_bytes,
        graphs=graphs,
        head=loaded.model.get_output_embeddings() if decoder is None else decoder.head,
        longest_prefix=original,
        adapters=adapters,
    )


def _adapters(
    loaded: LoadedModel, options: EngineOptions, state: StepState, decoder: fuse.FusedDecoder | None
) -> AdapterSlots:
    """The places of adapters in a prepared model; none is loaded yet."""
    weight = loaded.model.get_input_embeddings().weight
    like = torch.empty(0, dtype=loaded.dtype, device=weight.device)
    sites = Sites(state, loaded.linears, product_for(like, loaded.linears.values()), like)
    if decoder is None:
        install(loaded.model, sites)
    else:
        decoder.adapt(sites)
    config = None if loaded.directory is None else loaded.directory / "config.json"
    limits = AdapterLimits(options.max_adapters, options.adapter_bytes)
    return AdapterSlots(sites, loaded.model, config, limits, loaded.own_name)


def _with_walk(decoder: fuse.FusedDecoder, options: EngineOptions) -> str:
    """The kernels of a fused decoder, whose decode steps become one operator if it can be described."""
    if not options.compiled_walk:
        logger.info("decode steps run operator by operator: set by `--compiled-walk false`")
        return "fused"
    try:
        decoder.compile_walk()
    except Undescribed as undescribed:
        logger.info("decode steps run operator by operator: %s", undescribed.reason)
        return "fused"
    logger.info("decode steps run as one operator")
    return "fused,walk"


def _graphed(
    forward: RaggedForward, loaded: LoadedModel, choice: AttentionChoice, options: EngineOptions
) -> GraphedForward | None:
    """The forward with captured decode steps; None if a step needs the host, or if no step is to be captured."""
    device, requested = loaded.device, options.cuda_graphs
    reason = None
    if device.type != "cuda":
        reason = f"a {device.type} device captures no steps"
    elif not choice.decode.is_capturable:
        reason = f"{choice.decode.name} attention reads its tables on the host"
    elif options.has_adapters:
        reason = "the groups of adapters in a step are on the host"
    elif loaded.vision is not None and loaded.vision.has_grid:
        reason = "its rotary positions have three axes"
    elif rotary.needs_lengths(loaded.model):
        reason = "its rotary positions depend on each request's length, which is on the host"
    elif loaded.quantization is not None and not loaded.quantization.scheme.is_capturable:
        reason = f"{loaded.quantization.scheme.name} reads its inputs on the host"
    elif dist.is_initialized():
        reason = "capture with several shards is not tested"
    if reason is not None:
        refuse_graphs(requested, reason)
        return None
    if requested == (0,):
        return None
    return GraphedForward(forward, lambda: CudaGraphs(device), choice.block_size)


def _padded(loaded: LoadedModel, options: EngineOptions, tokenizer: Tokenizer, state: StepState) -> PreparedModel:
    rotary.refuse(loaded.model)
    forward = PaddedForward(loaded.model, state, loaded.device)
    prepared = _own_attention("padded", loaded, options, forward, forward.probe())
    return _first_exact([prepared], loaded, tokenizer, state)


def _encoder_decoder(
    loaded: LoadedModel, options: EngineOptions, tokenizer: Tokenizer, state: StepState
) -> PreparedModel:
    """Rows of all decoder lengths together if the model allows it, else one length at a time."""
    candidates = []
    for equal_lengths in (False, True):
        forward = EncoderDecoderForward(loaded.model, state, loaded.device, equal_lengths=equal_lengths)
        candidates.append(_own_attention("encoder_decoder", loaded, options, forward, forward.probe()))
    prepared = _first_exact(candidates, loaded, tokenizer, state)
    return replace(prepared, start_id=_start_id(loaded))


def _recurrent(loaded: LoadedModel, options: EngineOptions, tokenizer: Tokenizer, state: StepState) -> PreparedModel:
    if loaded.cache.float8 is not None:
        raise UnsupportedError(
            f"`--kv-cache-dtype {options.kv_cache_dtype}` cannot be served with {type(loaded.model).__name__}: it has "
            "no keys and values; leave it out"
        )
    forward = RecurrentForward(loaded.model, loaded.device)
    forward.probe()
    return _first_exact([_own_attention("recurrent", loaded, options, forward, ())], loaded, tokenizer, state)


def _own_attention(
    tier: Tier, loaded: LoadedModel, options: EngineOptions, forward: Forward, shapes: tuple[LayerShape, ...]
) -> PreparedModel:
    """A model that uses its own attention; `--attention` still sets the page."""
    if options.prefix_caching:
        # The launcher enables it by default, without information about the tier.
        logger.warning("prefix caching is off: %s runs in the %s tier", type(loaded.model).__name__, tier)
    if loaded.cache.float8 == torch.float8_e4m3fn:
        logger.warning("the K/V scales are 1: %s runs in the %s tier", type(loaded.model).__name__, tier)
    head_dims = frozenset(shape.head_dim for shape in shapes)
    # Excludes the compiled kernels: a chosen kernel is built, and none is called here.
    needs = AttentionNeeds(loaded.device.type, loaded.dtype, head_dims)
    choice = choose(replace(options, fuse=False), needs)
    return PreparedModel(tier, forward, shapes, choice, loaded.cache.dtype(loaded.dtype))


def _first_exact(
    candidates: list[PreparedModel], loaded: LoadedModel, tokenizer: Tokenizer, state: StepState
) -> PreparedModel:
    distances = [
        distance_from_alone(each.forward, loaded, tokenizer, state, each.shapes, each.choice.block_size)
        for each in candidates
    ]
    # Rounding does not make one candidate's distance much larger than another's.
    rounding = limit_of(loaded.dtype)
    limit = min(rounding, max(2 * min(distances), rounding / 10))
    for prepared, distance in zip(candidates, distances, strict=True):
        if distance <= limit:
            return prepared
    raise _refusal(loaded, "its outputs in a batch differ from those of each prompt alone")


def _start_id(loaded: LoadedModel) -> int:
    for config in (getattr(loaded.model, "generation_config", None), loaded.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            start_id = getattr(config, name, None)
            if isinstance(start_id, int):
                return start_id
    raise _refusal(loaded, "its config names no `decoder_start_token_id`")


def _refusal(loaded: LoadedModel, reason: str) -> UnsupportedError:
    tier = loaded.family.tier.replace("_", "-")
    return UnsupportedError(f"{type(loaded.model).__name__} cannot be served through the {tier} tier: {reason}")
