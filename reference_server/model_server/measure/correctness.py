"""Check results before anything is timed: attention kernels, a small model, captured steps."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from reference_server.errors import UnsupportedError
from reference_server.model_server.attention import conformance, select
from reference_server.model_server.attention.conformance import CASES, ROWS, ConformanceCase
from reference_server.model_server.attention.kernel import AttentionKernel, CacheStore
from reference_server.model_server.attention.select import AttentionBackend
from reference_server.model_server.attention.store import TorchStore
from reference_server.model_server.attention.torch_backend import TorchDecode, TorchPrefill
from reference_server.model_server.device import first_line
from reference_server.model_server.forward.inputs import build_inputs
from reference_server.model_server.measure.record import MeasurePlan, Record
from reference_server.model_server.measure.rig import Rig
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
# Torch kernels round the scores to the type of the cache; the others keep them in float32.
TORCH_SLACK = 5
OTHER_TYPES = ("grouped", "softcap, grouped, window", "alibi")
LOGITS_LIMIT = 2e-2
MODEL = "tiny-llama"
# Shapes of the presets, in addition to those of the conformance suite.
SHAPES = {
    "llama 8B": ConformanceCase(32, 8, head_dim=128),
    "llama 8B, page of 256": ConformanceCase(32, 8, head_dim=128, block_size=256),
    "llama 1B": ConformanceCase(32, 8, head_dim=64),
    "qwen 7B": ConformanceCase(28, 4, head_dim=128),
    "bloom": ConformanceCase(16, 16, head_dim=64, alibi=True),
}


def check(record: Record, plan: MeasurePlan) -> None:
    """Check every kernel of this device, then the whole model."""
    for each in select.BACKENDS:
        record.attempt(f"{each.name} attention", partial(check_backend, record, each))
    record.attempt(f"{MODEL} against eager", lambda: _check_logits(record, plan))
    record.attempt("graphs against eager", lambda: _check_graphs(record, plan))


def check_backend(record: Record, each: AttentionBackend) -> None:
    """Check each phase in each type, with a torch kernel for the other phase; every run draws new inputs."""
    seed = time.time_ns() % (1 << 31)
    worst: dict[tuple[str, torch.dtype], tuple[float, str]] = {}
    for name, case, dtype in _cases():
        needs = case.needs(record.device, dtype)
        pairs: dict[str, tuple[type[AttentionKernel], type[AttentionKernel] | None, type[CacheStore]]] = {
            "prefill": (each.prefill, TorchDecode, TorchStore),
            "decode": (TorchPrefill, each.decode, each.store),
        }
        for phase, (prefill, decode, store) in pairs.items():
            if decode is None or not (prefill if phase == "prefill" else decode).supports(needs):
                continue
            kernels = prefill(), decode(), store()
            try:
                outcome = conformance.run(*kernels, case, ROWS[phase], record.device, dtype, seed)
            except torch.AcceleratorError:
                raise
            except RuntimeError as raised:
                # A kernel must compute every case that it supports by its own statement.
                record.note(f"{each.name} {phase}, {dtype}, {name}: {first_line(raised)}")
                worst[phase, dtype] = (float("inf"), name)
                continue
            error = outcome.relative_error
            if error >= worst.get((phase, dtype), (-1.0, ""))[0]:
                worst[phase, dtype] = (error, name)
    if not worst:
        record.note(f"{each.name} attention supports no case on this device")
    for (phase, dtype), (error, name) in worst.items():
        limit = LIMITS[dtype] * (TORCH_SLACK if each is select.TORCH else 1)
        record.check(f"{each.name} {phase}, {dtype}, worst case: {name}", error, limit)


def _cases() -> Iterator[tuple[str, ConformanceCase, torch.dtype]]:
    """All cases in bfloat16; a few in the other types, as each kernel has to be compiled first."""
    for name, case in {**CASES, **SHAPES}.items():
        yield name, case, torch.bfloat16
    for name in OTHER_TYPES:
        yield name, CASES[name], torch.float16
        yield name, CASES[name], torch.float32


def _check_logits(record: Record, plan: MeasurePlan) -> None:
    """Compare logits with Transformers' own model; in float32 the greedy ids too."""
    directory = loader.locate(EngineOptions(f"preset:{MODEL}")).directory
    types: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
    for dtype in types:
        rig = Rig(MODEL, plan, dtype=dtype, load_format="auto", graphs=False)
        eager = _eager(directory, rig)
        batch = rig.batch(3, 40, 8, is_prefilled=False)
        ours = rig.prepared.forward(build_inputs(batch, prompt_logprobs=False)).double()
        prompts = torch.tensor([sequence.ids for sequence in batch.sequences], device=rig.device)
        theirs = eager(input_ids=prompts).logits[:, -1].double()
        error = float((ours - theirs).norm() / theirs.norm())
        record.check(f"{MODEL} logits, {dtype}, against eager", error, LOGITS_LIMIT if dtype == "bfloat16" else 1e-4)
        if dtype == "float32":
            record.check(f"{MODEL} greedy ids, {dtype}, against eager", _different_ids(rig, eager), 0)
        rig.close()


def _eager(directory: Path, rig: Rig) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=rig.loaded.dtype, attn_implementation="eager")
    return model.to(rig.device).eval()


def _different_ids(rig: Rig, eager: Any, steps: int = 24) -> float:
    """The number of generated tokens that differ."""
    batch = rig.batch(2, 20, steps, is_prefilled=False)
    prompts = torch.tensor([sequence.ids for sequence in batch.sequences], device=rig.device)
    for _ in range(steps):
        launched = rig.stepper.launch(batch, batch.live)
        rig.stepper.read(batch, [launched])
    ours = torch.tensor([sequence.generated_ids for sequence in batch.sequences])
    expected = _greedy(eager, prompts, steps)
    return float((ours != expected.cpu()).sum())


def _greedy(model: Any, prompts: Tensor, steps: int) -> Tensor:
    ids = prompts
    for _ in range(steps):
        ids = torch.cat((ids, model(input_ids=ids).logits[:, -1].argmax(-1)[:, None]), 1)
    return ids[:, prompts.shape[1] :]


def _check_graphs(record: Record, plan: MeasurePlan) -> None:
    """Compare a replayed step bit for bit with a step of the same size without a graph, padding rows included."""
    if record.device.type != "cuda":
        record.note("CUDA graphs are not checked: no GPU")
        return
    rig = Rig(MODEL, plan, load_format="auto")
    compare_graphs(record, rig)
    rig.close()


def compare_graphs(record: Record, rig: Rig) -> None:
    graphs = rig.prepared.graphs
    if graphs is None or not graphs.sizes:
        raise UnsupportedError("no decode step could be captured")
    for rows in sorted({1, 3, graphs.sizes[-1]}):
        inputs = build_inputs(rig.batch(rows, 40, 8, is_prefilled=True), prompt_logprobs=False)
        expected = graphs.computed(inputs).clone()
        replayed = rig.prepared.forward(inputs)
        record.check(f"{MODEL}, {rows} rows: graph against eager, bitwise", float((expected != replayed).sum()), 0)
