"""Level S: one step, from ids to chosen ids, in device time. Level E: the engine's loop, in wall time."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.decoding.logits import RowParameters
from reference_server.model_server.decoding.sampling import TokenChooser
from reference_server.model_server.forward.inputs import build_inputs
from reference_server.model_server.measure.record import MeasurePlan, Record
from reference_server.model_server.measure.rig import MAX_NEW_TOKENS, Floors, Rig
from reference_server.model_server.measure.timing import median_and_spread, synchronize
from reference_server.model_server.stepper import RunAhead


def measure_steps(record: Record, plan: MeasurePlan, rig: Rig, until: float) -> None:
    """Time decode at each batch size and context length, prefill at each shape."""
    floors = Floors(rig.preset, record.ceilings)
    for context in plan.contexts:
        for rows in plan.batches:
            name = f"{rig.preset}: S decode b={rows} ctx={context}"
            if _may_measure(record, rig, until, rows, context + MAX_NEW_TOKENS, name):
                record.attempt(name, partial(_decode, record, plan, rig, floors, rows, context))
    for rows, length in plan.prefills:
        name = f"{rig.preset}: S prefill {rows}x{length}"
        if _may_measure(record, rig, until, rows, length + MAX_NEW_TOKENS, name):
            record.attempt(name, partial(_prefill, record, plan, rig, floors, rows, length))


def _may_measure(record: Record, rig: Rig, until: float, rows: int, tokens: int, name: str) -> bool:
    if record.elapsed > until or record.seconds_left <= 0:
        record.note(f"{name}: skipped, its time is up")
        return False
    if not rig.fits(rows, tokens):
        record.note(f"{name}: skipped, the batch does not fit in the K/V cache")
        return False
    return True


def _decode(record: Record, plan: MeasurePlan, rig: Rig, floors: Floors, rows: int, context: int) -> None:
    batch = rig.batch(rows, context, MAX_NEW_TOKENS, is_prefilled=True)
    inputs = build_inputs(batch, prompt_logprobs=False)
    graphs = rig.prepared.graphs
    replay = None if graphs is None else graphs.replay_of(inputs)
    forward: Callable[[], Tensor] = replay or (lambda: rig.prepared.forward(inputs))
    step = _with_choice(rig, batch, forward, rows)
    value, spread = median_and_spread(rig.device, step, plan.warmups, plan.replays)
    mean_context = context + (plan.warmups + plan.replays / 2 if replay else 0)
    record.add(
        *(rig.preset, "S", "decode", rows, context, value),
        floor=floors.decode_ms(rows, mean_context),
        spread=spread,
        kernels=count_kernels(rig.device, step),
        settings={"graph": replay is not None},
    )


def _prefill(record: Record, plan: MeasurePlan, rig: Rig, floors: Floors, rows: int, length: int) -> None:
    batch = rig.batch(rows, length, MAX_NEW_TOKENS, is_prefilled=False)
    inputs = build_inputs(batch, prompt_logprobs=False)
    step = _with_choice(rig, batch, lambda: rig.prepared.forward(inputs), rows)
    value, spread = median_and_spread(rig.device, step, min(2, plan.warmups), min(10, plan.replays))
    kernels = count_kernels(rig.device, step)
    record.add(
        *(rig.preset, "S", "prefill", rows, length, value),
        floor=floors.prefill_ms(rows, length),
        spread=spread,
        kernels=kernels,
    )


def _with_choice(rig: Rig, batch: SequenceBatch, forward: Callable[[], Tensor], rows: int) -> Callable[[], object]:
    """The forward, followed by a greedy choice."""
    parameters = [RowParameters.of(sequence.request, sequence.prompt_len) for sequence in batch.sequences]
    chooser = TokenChooser(parameters, rig.loaded.config.vocab_size, frozenset(), rig.device)
    ids = [sequence.ids for sequence in batch.sequences]
    return lambda: chooser.choose(forward()[:rows], ids)


def count_kernels(device: torch.device, step: Callable[[], object]) -> int | None:
    """Number of kernels that one call launches; on a CPU, of operators."""
    from torch.profiler import ProfilerActivity, profile

    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_device else [ProfilerActivity.CPU]
    try:
        with profile(activities=activities) as profiler:
            step()
            synchronize(device)
    except RuntimeError:
        # Some machines do not allow profiling.
        return None
    events = profiler.events() or []
    if on_device:
        return sum(1 for event in events if str(event.device_type).endswith("CUDA")) or None
    return sum(1 for event in events if str(event.name).startswith("aten::"))


def measure_engine(record: Record, plan: MeasurePlan, rig: Rig, until: float) -> None:
    """Time steady decode in the engine's loop, detokenization included, with run-ahead off and on."""
    context = plan.contexts[0]
    steps = {result.batch: result.value for result in record.results if _is_step(result, rig.preset, context)}
    for rows in plan.engine_batches:
        for ahead in (False, True):
            name = f"{rig.preset}: E decode b={rows} run-ahead {'on' if ahead else 'off'}"
            # 10 s more than the steps, which may have used all of the time.
            if _may_measure(record, rig, until + 10, rows, context + plan.engine_steps + 2, name):
                record.attempt(name, partial(_engine, record, plan, rig, rows, ahead, steps.get(rows)))


def _engine(record: Record, plan: MeasurePlan, rig: Rig, rows: int, ahead: bool, step_ms: float | None) -> None:
    context = plan.contexts[0]
    measured = _loop(plan, rig, rows, context, ahead)
    value = measured.pop("ms_per_step")
    settings = {"run_ahead": ahead, **measured}
    record.add(*(rig.preset, "E", "decode", rows, context, value), floor=step_ms, settings=settings)


def _is_step(result: Any, preset: str, context: int) -> bool:
    key = (result.preset, result.level, result.phase, result.context)
    return bool(key == (preset, "S", "decode", context))


def _loop(plan: MeasurePlan, rig: Rig, rows: int, context: int, ahead: bool) -> dict[str, float]:
    """Wall time per step, host CPU time per token, and the fraction of time with no step on the device."""
    stepper, timer = rig.stepper, _LaunchTimer(rig.device)
    stepper.run_ahead = rig.run_ahead if ahead else RunAhead.OFF
    batch = rig.batch(rows, context, plan.engine_steps + 2, is_prefilled=True)
    first = stepper.step(batch).batch
    assert first is not None
    batch = first
    synchronize(rig.device)
    stepper.launch = timer.around(stepper.launch)  # type: ignore[method-assign]
    try:
        started, processor = time.perf_counter(), time.process_time()
        for _ in range(plan.engine_steps - 2):
            output = stepper.step(batch)
            assert output.batch is not None
            batch = stepper.launch_ahead(output.batch)
        synchronize(rig.device)
        wall, processor = time.perf_counter() - started, time.process_time() - processor
    finally:
        del stepper.launch
    steps = plan.engine_steps - 2
    measured = {"ms_per_step": wall / steps * 1e3, "host_us_per_token": processor / steps / rows * 1e6}
    if (busy := timer.busy_s()) is not None:
        measured["idle_share"] = max(0.0, 1 - busy / wall)
    return measured


class _LaunchTimer:
    """Records a device event before and after each launch."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._pairs: list[tuple[Any, Any]] = []

    def around(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        if not self._on_device:
            return launch

        def timed(*args: Any, **kwargs: Any) -> Any:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            launched = launch(*args, **kwargs)
            last.record()
            self._pairs.append((first, last))
            return launched

        return timed

    def busy_s(self) -> float | None:
        if not self._pairs:
            return None
        return float(sum(first.elapsed_time(last) for first, last in self._pairs)) / 1e3
