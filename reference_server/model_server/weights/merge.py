"""Merges an adapter into its base model, into a directory that is served like any other model.

The base model keeps its dtype; TGI's merge converts it to float16, in which a bfloat16 model may overflow.
"""

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from reference_server.errors import StartupError, UnsupportedError
from reference_server.model_server.weights.adapter import Adapter
from reference_server.model_server.weights.files import INDEX_FILES, SAFETENSORS, file_names, small_names

logger = logging.getLogger(__name__)

SHARD_SIZE = "10GB"


def merge(adapter: Adapter, base: Path, target: Path, trust_remote_code: bool = False) -> None:
    """Write the merged model to `target`, with the base model's config and tokenizer if `target` has none.

    Until this returns, `target` lacks weights.
    """
    started = time.monotonic()
    disable_progress_bar()
    model = _load(adapter, base, trust_remote_code)
    add(adapter, model)
    target = target.resolve()
    scratch = target.with_name(f".{target.name}.merging")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        model.save_pretrained(scratch, max_shard_size=SHARD_SIZE)
        # The base's config and tokenizer replace those that Transformers wrote.
        for name in set(small_names(file_names(base), trust_remote_code)).difference(INDEX_FILES):
            shutil.copyfile(base / name, scratch / name)
        # safetensors creates files with mode 0600.
        for path in scratch.glob(f"*{SAFETENSORS}"):
            shutil.copymode(scratch / "config.json", path)
        _move(scratch, target)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"the merged model cannot be written to {target}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("Merge: %d weights changed -- Took: %.1f s", len(adapter.factors), time.monotonic() - started)


@torch.no_grad()
def add(adapter: Adapter, model: Any) -> None:
    """Add the adapter to the weights of `model`, in float32. Raises StartupError naming a weight that does not fit."""
    modules = dict(model.named_modules())
    for name, factors in adapter.factors.items():
        module = modules.get(name)
        if not isinstance(module, torch.nn.Linear | Conv1D):
            kind = "no module" if module is None else type(module).__name__
            raise UnsupportedError(f"the adapter changes {name}, which is {kind} of {type(model).__name__}")
        delta = factors.delta(adapter.scaling)
        # Weights of GPT-2 are [in, out].
        delta = delta.T if isinstance(module, Conv1D) else delta
        weight = module.weight
        if weight.shape != delta.shape:
            raise StartupError(f"the adapter's {name} is {tuple(delta.shape)}, the base's {tuple(weight.shape)}")
        weight.copy_(weight.float() + delta)


def _load(adapter: Adapter, base: Path, trust_remote_code: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise StartupError(f"{adapter.base_model_id} is no model to merge an adapter into: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{adapter.base_model_id} is quantized, and an adapter is merged into whole weights only"
        )
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        model, report = auto_class.from_pretrained(
            base,
            config=config,
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise StartupError(f"the base model {adapter.base_model_id} could not be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        # Transformers initializes missing weights at random.
        raise StartupError(f"the base model {adapter.base_model_id} has no weights for {', '.join(missing[:8])}")
    return model


def _move(scratch: Path, target: Path) -> None:
    """Move in one step if `target` is new, otherwise the weights last."""
    if not target.exists():
        scratch.rename(target)
        return
    for path in sorted(scratch.iterdir(), key=lambda path: path.suffix == SAFETENSORS):
        if path.name in INDEX_FILES or path.suffix == SAFETENSORS or not (target / path.name).exists():
            path.replace(target / path.name)
