"""Level S, one step from ids to chosen ids by the device's clock; level E, the engine's own loop by the wall's."""

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
from reference_server.model_server.measure.record import Plan, Record, median_and_spread, synchronize
from reference_server.model_server.measure.rig import ROOM, Floors, Rig
from reference_server.model_server.run_ahead import RunAhead


def measure_steps(record: Record, plan: Plan, rig: Rig, until: float) -> None:
    """Decode at each batch and context, prefill at each shape."""
    floors = Floors(rig.preset, record.ceilings)
    for context in plan.contexts:
        for rows in plan.batches:
            name = f"{rig.preset}: S decode b={rows} ctx={context}"
            if _may_measure(record, rig, until, rows, context + ROOM, name):
                record.attempt(name, partial(_decode, record, plan, rig, floors, rows, context))
    for rows, length in plan.prefills:
        name = f"{rig.preset}: S prefill {rows}x{length}"
        if _may_measure(record, rig, until, rows, length + ROOM, name):
            record.attempt(name, partial(_prefill, record, plan, rig, floors, rows, length))


def _may_measure(record: Record, rig: Rig, until: float, rows: int, tokens: int, what: str) -> bool:
    if record.elapsed > until or record.seconds_left <= 0:
        record.note(f"{what}: not begun, its time is up")
        return False
    if not rig.holds(rows, tokens):
        record.note(f"{what}: the cache holds no such batch beside the weights")
        return False
    return True


def _decode(record: Record, plan: Plan, rig: Rig, floors: Floors, rows: int, context: int) -> None:
    batch = rig.batch(rows, context, ROOM, is_prefilled=True)
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


def _prefill(record: Record, plan: Plan, rig: Rig, floors: Floors, rows: int, length: int) -> None:
    batch = rig.batch(rows, length, ROOM, is_prefilled=False)
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
    """The forward with a greedy choice behind it."""
    parameters = [RowParameters.of(sequence.request, sequence.prompt_len) for sequence in batch.sequences]
    chooser = TokenChooser(parameters, rig.loaded.config.vocab_size, frozenset(), rig.device)
    ids = [sequence.ids for sequence in batch.sequences]
    return lambda: chooser.choose(forward()[:rows], ids)


def count_kernels(device: torch.device, step: Callable[[], object]) -> int | None:
    """Kernels that one call launches; operators where host and device are one."""
    from torch.profiler import ProfilerActivity, profile

    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_device else [ProfilerActivity.CPU]
    try:
        with profile(activities=activities) as profiler:
            step()
            synchronize(device)
    except RuntimeError:
        # Counting is not allowed on every machine.
        return None
    events = profiler.events() or []
    if on_device:
        return sum(1 for event in events if str(event.device_type).endswith("CUDA")) or None
    return sum(1 for event in events if str(event.name).startswith("aten::"))


def measure_engine(record: Record, plan: Plan, rig: Rig, until: float) -> None:
    """Steady decode through the engine's loop, text work included, with run-ahead off and on."""
    context = plan.contexts[0]
    steps = {result.batch: result.value for result in record.results if _is_step(result, rig.preset, context)}
    for rows in plan.engine_batches:
        for ahead in (False, True):
            name = f"{rig.preset}: E decode b={rows} run-ahead {'on' if ahead else 'off'}"
            # A little later than the steps, which may have used all of the time.
            if _may_measure(record, rig, until + 10, rows, context + plan.engine_steps + 2, name):
                record.attempt(name, partial(_engine, record, plan, rig, rows, ahead, steps.get(rows)))


def _engine(record: Record, plan: Plan, rig: Rig, rows: int, ahead: bool, step_ms: float | None) -> None:
    context = plan.contexts[0]
    measured = _loop(plan, rig, rows, context, ahead)
    value = measured.pop("ms_per_step")
    settings = {"run_ahead": ahead, **measured}
    record.add(*(rig.preset, "E", "decode", rows, context, value), floor=step_ms, settings=settings)


def _is_step(result: Any, preset: str, context: int) -> bool:
    own = (result.preset, result.level, result.phase, result.context)
    return bool(own == (preset, "S", "decode", context))


def _loop(plan: Plan, rig: Rig, rows: int, context: int, ahead: bool) -> dict[str, float]:
    """Wall time a step, processor time a token, and the share of the wall's time in which no step was on the device."""
    generator, marks = rig.generator, _Marks(rig.device)
    run_ahead = RunAhead(generator, ahead, launches_first=rig.device.type != "cpu")
    batch = rig.batch(rows, context, plan.engine_steps + 2, is_prefilled=True)
    first = run_ahead.step(batch).batch
    assert first is not None
    batch = first
    synchronize(rig.device)
    generator.launch = marks.around(generator.launch)  # type: ignore[method-assign]
    try:
        started, processor = time.perf_counter(), time.process_time()
        for _ in range(plan.engine_steps - 2):
            output = run_ahead.step(batch)
            assert output.batch is not None
            batch = output.batch if run_ahead.launches_first else run_ahead.launch(output.batch)
        synchronize(rig.device)
        wall, processor = time.perf_counter() - started, time.process_time() - processor
    finally:
        del generator.launch
    taken = plan.engine_steps - 2
    measured = {"ms_per_step": wall / taken * 1e3, "host_us_per_token": processor / taken / rows * 1e6}
    if (busy := marks.busy_s()) is not None:
        measured["idle_share"] = max(0.0, 1 - busy / wall)
    return measured


class _Marks:
    """Events before and behind what each launch puts on the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._pairs: list[tuple[Any, Any]] = []

    def around(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        if not self._on_device:
            return launch

        def marked(*args: Any, **kwargs: Any) -> Any:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            launched = launch(*args, **kwargs)
            last.record()
            self._pairs.append((first, last))
            return launched

        return marked

    def busy_s(self) -> float | None:
        if not self._pairs:
            return None
        return float(sum(first.elapsed_time(last) for first, last in self._pairs)) / 1e3
