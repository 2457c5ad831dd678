"""Compare with Transformers' continuous batching: same shapes, random weights, greedy, no end-of-sequence."""

import dataclasses
import gc
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from reference_server.model_server.measure.record import MeasurePlan, Record
from reference_server.model_server.measure.rig import Rig, release
from reference_server.model_server.measure.timing import synchronize
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions

GPU_SETTINGS = {"use_cuda_graph": True, "use_async_batching": True}


def measure(record: Record, plan: MeasurePlan, preset: str, attention: str | None) -> None:
    """Output tokens/s of both, prefill included, one after the other in the same process."""
    shapes = [(rows, plan.peer_prompt, plan.peer_tokens) for rows in plan.peer_batches]
    engine_rates = _engine(plan, preset, shapes, attention)
    release()

    def store(shape: Shape, peer_rate: float, settings: dict[str, Any]) -> None:
        engine_rate, (rows, prompt, tokens) = engine_rates[shape], shape
        record.peers.append(
            {
                "preset": preset, "peer": "transformers continuous batching", "batch": rows, "prompt": prompt,
                "tokens": tokens, "engine_tokens_per_s": engine_rate, "peer_tokens_per_s": peer_rate,
                "ratio": engine_rate / peer_rate,
                "valid": record.is_valid, "settings": settings,
            }
        )  # fmt: skip

    _transformers(record, preset, shapes, store)


Shape = tuple[int, int, int]


def _engine(plan: MeasurePlan, preset: str, shapes: list[Shape], attention: str | None) -> dict[Shape, float]:
    sizes = tuple(rows for rows, _, _ in shapes)
    rig = Rig(preset, dataclasses.replace(plan, batches=sizes, engine_batches=sizes), attention)
    rates = {}
    for shape in shapes:
        rows, prompt, tokens = shape
        for _ in range(2):
            rig.stepper.run_ahead = rig.run_ahead
            batch = rig.batch(rows, prompt, tokens, is_prefilled=False)
            synchronize(rig.device)
            started = time.perf_counter()
            while (output := rig.stepper.step(batch)).batch is not None:
                batch = output.batch
            rate = rows * tokens / (time.perf_counter() - started)
        rates[shape] = rate
    rig.close()
    return rates


def _transformers(
    record: Record, preset: str, shapes: list[Shape], store: Callable[[Shape, float, dict[str, Any]], None]
) -> None:
    """Measure the peer; each rate is stored as soon as it is known."""
    directory = loader.locate(EngineOptions(f"preset:{preset}")).directory
    config = AutoConfig.from_pretrained(directory)
    attention = _attention()
    random = np.random.default_rng(3)
    # The threads and graphs of Transformers fail with inference-mode tensors.
    with torch.inference_mode(False), torch.no_grad():
        with torch.device(record.device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        model.eval()
        for shape in shapes:
            rows, prompt, tokens = shape
            prompts = random.integers(0, config.vocab_size, (rows, prompt)).tolist()
            generation = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
            batching = _batching(record, rows * (prompt + tokens))
            for _ in range(2):
                started = time.perf_counter()
                results = model.generate_batch(inputs=prompts, generation_config=generation, **_config(model, batching))
                elapsed = time.perf_counter() - started
            generated = sum(len(result.generated_tokens) for result in results.values())
            if generated != rows * tokens:
                record.note(f"{preset}: Transformers generated {generated} of {rows * tokens} tokens")
            settings = {"attention": attention, "batching": {name: str(value) for name, value in batching.items()}}
            store(shape, generated / elapsed, settings)
    del model
    gc.collect()


def _attention() -> str:
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return "sdpa"
    return "flash_attention_2"


def _batching(record: Record, num_tokens: int) -> dict[str, Any]:
    """Settings of the peer that this Transformers release supports."""
    from transformers import ContinuousBatchingConfig

    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    if missing := [name for name in GPU_SETTINGS if name not in known]:
        record.note(f"this release of Transformers has no {', '.join(missing)}")
    if record.device.type == "cuda":
        return {name: value for name, value in GPU_SETTINGS.items() if name in known}
    # On a CPU the size of the K/V cache has to be given.
    page = 256
    page_name = "page_size" if "page_size" in known else "block_size"
    return {"num_blocks": 4 * (num_tokens // page + 8), "max_batch_tokens": 1024, page_name: page}


def _config(model: Any, batching: dict[str, Any]) -> dict[str, Any]:
    from transformers import ContinuousBatchingConfig

    parameters = inspect.signature(model.generate_batch).parameters
    if "continuous_batching_config" in parameters:
        return {"continuous_batching_config": ContinuousBatchingConfig(**batching)}
    return batching
