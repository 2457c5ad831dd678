"""Sample pages of runs and studies with rare parts: groups of requests, replicas, imports, studies of other servers."""

import dataclasses
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from loadgen.commands.import_runs import read_file
from loadgen.imports.imported_run import ImportedLoad
from reports.document import Report
from reports.metrics.summary import Analysis, analyse_run
from reports.metrics.sweep import LoadPoint, Sweep
from reports.pages.run_page import build_run_report
from reports.pages.step_page import build_step_report
from reports.pages.study.page import build_study_report
from reports.pages.sweep_page import build_sweep_report
from reports.study import Knob
from tests.support.samples.imported_files import aiperf_rows, guidellm_report
from tests.support.samples.sample_run import SampleLoad, sample_run
from tests.support.samples.sample_study import sample_study

IMPORTED = Path(__file__).parent / "imported" / "vllm_bench_rate_20.json"


def groups_report() -> Report:
    """A run with structured answers, adapters, and an eighth of failed requests with two causes."""
    run = sample_run(SampleLoad(seed=3, duration_s=60, rate=6, failure_share=0.12))
    for number, record in enumerate(run.records):
        record.adapter = (None, "poems", "clerk")[number % 3]
        if number % 2 and record.error_type is None:
            record.constraint, record.validity = ("schema", "valid" if number % 30 else "cut")
        if record.error_type is not None and number % 4 == 0:
            record.error_type = "connect/refused"
    return build_run_report([Analysis.of(run)])


def overloaded_report() -> Report:
    """A run whose server refused more than a third of the requests."""
    return build_run_report([Analysis.of(sample_run(SampleLoad(rate=40, slots=32, max_in_flight=36, failure_share=0)))])


def replicas_report() -> Report:
    """A run over three URLs, with the start-up time of a server that it started."""
    run = sample_run(SampleLoad(seed=3, duration_s=60, rate=6))
    run.manifest.target["replicas"] = ["http://127.0.0.1:8081", "http://127.0.0.1:8082"]
    run.manifest.target["start_up"] = {"ready_s": 12.4, "first_token_s": 12.9}
    run.manifest.config["balance"] = "round_robin"
    for number, record in enumerate(run.records):
        record.replica = number % 3
    return build_run_report([Analysis.of(run)])


def imported_report() -> Report:
    """A run from a file of another tool."""
    with tempfile.TemporaryDirectory() as directory:
        [run] = read_file(IMPORTED, None)
        run.write(Path(directory), IMPORTED)
        return build_run_report([analyse_run(Path(directory))])


def aiperf_report() -> Report:
    """A run from the records of aiperf, with failed requests; the load is that of the flags."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "profile_export.jsonl"
        file.write_text("\n".join(map(json.dumps, aiperf_rows(num_measured=240, spread_ms=12.0))), encoding="utf-8")
        [run] = read_file(file, ImportedLoad(rate=10.0, mode="poisson"))
        run.write(Path(directory) / "run", file)
        return build_run_report([analyse_run(Path(directory) / "run")])


def imported_sweep_report() -> Report:
    """The benchmarks of guidellm as a sweep over users."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "benchmarks.json"
        file.write_text(json.dumps(guidellm_report()), encoding="utf-8")
        points = []
        for run in read_file(file, None):
            run.write(Path(directory) / run.load.name, file)
            analysis = analyse_run(Path(directory) / run.load.name)
            points.append(LoadPoint(float(run.load.concurrency or 0), (analysis,)))
        return build_sweep_report(Sweep("concurrency", tuple(points), 0.95, ("tgi-bench", "import", file.name)))


def steps_report() -> Report:
    """A benchmark of the steps of a model server; percentiles that need more runs are missing."""
    frames = [
        pd.DataFrame(
            {"step": step, "batch_size": size, "runs": 10, "average": scale * of(size), "half_interval": 0.4 * scale}
            | {"lowest": 0.9 * scale * of(size), "highest": 1.2 * scale * of(size), "p50": scale * of(size)}
            | {"p90": 1.1 * scale * of(size), "p99": None}
            for step, scale in scales.items()
            for size in (1, 2, 4, 8, 16, 32)
        )
        for scales, of in (
            (LATENCY_SCALES, lambda size: 1 + 0.1 * size),
            (THROUGHPUT_SCALES, lambda size: size / (1 + 0.1 * size)),
        )
    ]
    facts = (("Load", (("prompt", "64 tokens"), ("answer", "8 tokens"))),)
    return build_step_report("preset:tiny-llama", frames[0], frames[1], facts)


LATENCY_SCALES = {"Prefill": 20.0, "Decode (token)": 4.0, "Decode (total)": 28.0}
THROUGHPUT_SCALES = {"Prefill": 50.0, "Prefill (prompt)": 3200.0, "Decode": 250.0}
NUMBERS: Mapping[str, Sequence[object]] = {"parallel": (1, 2, 4, 8, 16), "ubatch": (64, 128, 512, 1024)}
CHOICES: Mapping[str, Sequence[object]] = {
    "flash_attn": ("on", "off"),
    "kv_unified": (True, False),
    "cache_type_k": ("f16", "q8_0"),
}
DEFAULTS: Mapping[str, object] = {
    "parallel": 4,
    "ubatch": 512,
    "flash_attn": "auto",
    "kv_unified": True,
    "cache_type_k": "f16",
}


def profiled_report() -> Report:
    """A study of another server, over numbers and choices."""
    return _study_of({**NUMBERS, **CHOICES})


def choices_report() -> Report:
    """A study of another server, only over choices."""
    return _study_of(CHOICES)


def _study_of(values: Mapping[str, Sequence[object]]) -> Report:
    study, random_ = sample_study(), random.Random(1)
    knobs = tuple(Knob(name, DEFAULTS.get(name), "log" if name in NUMBERS else "category") for name in values)
    settings: dict[int, dict[str, object]] = {0: {}}
    for trial in study.searched[1:]:
        settings[trial.number] = {name: random_.choice(each) for name, each in values.items()}
    flags = (f"--{name.replace('_', '-')} {value}" for name, value in settings[study.winner or 0].items())
    command = " ".join(("llama-server", *flags))
    trials = tuple(
        dataclasses.replace(
            trial, settings=settings.get(trial.number if trial.confirms is None else trial.confirms, {})
        )
        for trial in study.trials
    )
    return build_study_report(
        dataclasses.replace(study, name="llamacpp", knobs=knobs, trials=trials, contributions=(), command=command)
    )
