"""Transformers' continuous batching beside the engine: same shape, random weights, greedy, no end-of-sequence."""

import dataclasses
import gc
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from reference_server.model_server.measure.record import Plan, Record, synchronize
from reference_server.model_server.measure.rig import Rig, release
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.run_ahead import RunAhead

ASKED = {"use_cuda_graph": True, "use_async_batching": True}


def measure(record: Record, plan: Plan, preset: str, attention: str | None) -> None:
    """Output tokens a second of both, prompts included, in the same process one after the other."""
    shapes = [(rows, plan.peer_prompt, plan.peer_tokens) for rows in plan.peer_batches]
    ours = _engine(plan, preset, shapes, attention)
    release()

    def keep(shape: Shape, theirs: float, settings: dict[str, Any]) -> None:
        own, (rows, prompt, tokens) = ours[shape], shape
        record.peers.append(
            {
                "preset": preset, "peer": "transformers continuous batching", "batch": rows, "prompt": prompt,
                "tokens": tokens, "engine_tokens_per_s": own, "peer_tokens_per_s": theirs, "ratio": own / theirs,
                "valid": record.is_valid, "settings": settings,
            }
        )  # fmt: skip

    _transformers(record, preset, shapes, keep)


Shape = tuple[int, int, int]


def _engine(plan: Plan, preset: str, shapes: list[Shape], attention: str | None) -> dict[Shape, float]:
    sizes = tuple(rows for rows, _, _ in shapes)
    rig = Rig(preset, dataclasses.replace(plan, batches=sizes, engine_batches=sizes), attention)
    rates = {}
    for shape in shapes:
        rows, prompt, tokens = shape
        for _ in range(2):
            run_ahead = RunAhead(rig.generator, enabled=True, launches_first=rig.device.type != "cpu")
            batch = rig.batch(rows, prompt, tokens, is_prefilled=False)
            synchronize(rig.device)
            started = time.perf_counter()
            while (output := run_ahead.step(batch)).batch is not None:
                batch = output.batch
            rate = rows * tokens / (time.perf_counter() - started)
        rates[shape] = rate
    rig.close()
    return rates


def _transformers(
    record: Record, preset: str, shapes: list[Shape], keep: Callable[[Shape, float, dict[str, Any]], None]
) -> None:
    """Its rates, each handed over as soon as it is known."""
    directory = loader.locate(EngineOptions(f"preset:{preset}")).directory
    config = AutoConfig.from_pretrained(directory)
    attention = _attention()
    random = np.random.default_rng(3)
    # Its own threads and graphs do not live with tensors of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        with torch.device(record.device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        model.eval()
        for shape in shapes:
            rows, prompt, tokens = shape
            prompts = random.integers(0, config.vocab_size, (rows, prompt)).tolist()
            generation = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
            asked = _batching(record, rows * (prompt + tokens))
            for _ in range(2):
                started = time.perf_counter()
                results = model.generate_batch(inputs=prompts, generation_config=generation, **_config(model, asked))
                elapsed = time.perf_counter() - started
            generated = sum(len(result.generated_tokens) for result in results.values())
            if generated != rows * tokens:
                record.note(f"{preset}: Transformers gave {generated} of {rows * tokens} tokens")
            settings = {"attention": attention, "batching": {name: str(value) for name, value in asked.items()}}
            keep(shape, generated / elapsed, settings)
    del model
    gc.collect()


def _attention() -> str:
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return "sdpa"
    return "flash_attention_2"


def _batching(record: Record, num_tokens: int) -> dict[str, Any]:
    """What is asked of it explicitly, as far as this release has a name for it."""
    from transformers import ContinuousBatchingConfig

    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    asked: dict[str, Any] = {}
    if record.device.type == "cuda":
        asked = {name: value for name, value in ASKED.items() if name in known}
    else:
        # On a CPU it has to be told how much memory it may take.
        page = 256
        asked = {"num_blocks": 4 * (num_tokens // page + 8), "max_batch_tokens": 1024}
        asked["page_size" if "page_size" in known else "block_size"] = page
    missing = [name for name in ASKED if name not in known]
    if missing:
        record.note(f"this release of Transformers has no {', '.join(missing)}")
    return asked


def _config(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from transformers import ContinuousBatchingConfig

    parameters = inspect.signature(model.generate_batch).parameters
    if "continuous_batching_config" in parameters:
        return {"continuous_batching_config": ContinuousBatchingConfig(**asked)}
    return asked
