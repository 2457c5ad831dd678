"""`tgi-bench compare`: two sides under one load, paired or stored, and what is left for people and CI."""

import argparse
import dataclasses
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from loadgen import settings
from loadgen.config import BenchConfig
from loadgen.errors import MeasurementError, UsageError
from loadgen.gate import Gate, GateResult, live_measure
from loadgen.present import render_table
from loadgen.progress import Progress, open_progress
from loadgen.redaction import redacted_argv
from loadgen.runner import make_run_directory, new_run_id
from loadgen.sides import SideText, open_side, planned_words, read_side
from loadgen.stored_sides import between_of, stored_runs
from reports import ci
from reports.compare import (
    LEAST_EFFECT,
    CompareOptions,
    Comparison,
    Refusal,
    direction_of,
    metrics_needed,
)
from reports.comparison_report import build_comparison_report, metrics_table, verdict_line
from reports.comparison_runs import runs_sections
from reports.plain_text import plain_text
from reports.report import write_built
from reports.requirement import Requirement
from reports.results import RunDirectoryError, replace_file, write_json
from reports.saved_comparison import COMPARISON_FILE, SavedComparison, comparison_json, load_comparison
from reports.stored import LEAST_RUNS, judge_stored

GITHUB = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")


def run(given: argparse.Namespace, arguments: Sequence[str]) -> tuple[str, int]:
    """Measure until decided, and write the files; returns the text for stdout and the exit code."""
    load = settings.load(BenchConfig, vars(given), given.config)
    options = options_of(given)
    texts = sides_of(given)
    if given.dry_run:
        return dry_run(texts, load), 0
    out: Path = given.out or Path("runs") / new_run_id()
    make_run_directory(out)
    if (out / COMPARISON_FILE).exists():
        raise UsageError(f"{out} holds a comparison already; give another --out or remove it")
    progress = open_progress()
    started_s = time.monotonic()
    try:
        result = _judged(texts, load, options, given, out, progress)
    finally:
        progress.close()
    comparison = result.comparison
    reproduce = ("tgi-bench " + shlex.join(redacted_argv(arguments)),)
    kept = [[run.directory for run in runs if run.directory] for runs in (result.runs_a, result.runs_b)]
    content = comparison_json(comparison, reproduce, *kept)
    write_json(out / COMPARISON_FILE, content)
    report = rebuild(out, out)[1]
    if given.junit is not None:
        _write(given.junit, ci.junit(comparison, time.monotonic() - started_s))
    if given.md is not None:
        _write(given.md, ci.comment(comparison, reproduce).encode())
    if given.metrics is not None:
        _write(given.metrics, ci.gitlab_metrics(comparison).encode())
    annotations = ci.write_ci(comparison, ci_environment(settings.environment(*GITHUB)), reproduce)
    progress.say(f"report: {report}")
    if given.json:
        return json.dumps(content, indent=2, allow_nan=False), result.exit_code
    return "\n".join(filter(None, (render(comparison), annotations))), result.exit_code


def sides_of(given: argparse.Namespace) -> tuple[SideText, SideText]:
    """The two sides of a command line. Raises UsageError."""
    words = list(given.sides)
    named: list[str | None] = [None, None]
    for index, command in enumerate((given.server_a, given.server_b)):
        if command is not None:
            named[index] = f"command:{command}"
    if given.against is not None:
        if named[0] is not None:
            raise UsageError("`against` names side A, and so does `server_a`")
        named[0] = f"baseline:{given.against}"
    for index in (0, 1):
        if named[index] is None and words:
            named[index] = words.pop(0)
    if words or None in named:
        raise UsageError("a comparison has two sides: give A and B, --against NAME and B, or --server-a and --server-b")
    labels, added = (given.label_a, given.label_b), (given.args_a, given.args_b)
    a, b = (read_side("ab"[i], str(named[i]), labels[i], added[i], given.docker_args) for i in (0, 1))
    check_docker((a, b), given.docker_args)
    if a.label == b.label:
        a, b = dataclasses.replace(a, label=f"A: {a.label}"), dataclasses.replace(b, label=f"B: {b.label}")
    if b.is_stored and not a.is_stored:
        raise UsageError("side B is stored and A is not: the stored side is the baseline, so give it first")
    check_relaunch((a, b), given.no_relaunch)
    return a, b


def check_docker(sides: Sequence[SideText], words: str | None) -> None:
    """Raises UsageError for a container's words where no side is an image."""
    if words is not None and all(side.kind != "image" for side in sides):
        raise UsageError(f"`docker_args` is {words!r} but no side is an image (image:NAME)")


def check_relaunch(sides: Sequence[SideText], is_accepted: bool) -> None:
    """Raises UsageError for a URL that nobody said may stay as it runs."""
    for side in sides:
        if side.kind == "url" and not is_accepted:
            raise UsageError(
                f"{side.name} cannot be launched afresh for every run, so what it remembers is measured too; "
                "add --no-relaunch to take it as it is"
            )


def dry_run(sides: Sequence[SideText], load: BenchConfig) -> str:
    """What would be started, and the load, as JSON."""
    servers = {side.letter: {"label": side.label, "server": redacted_argv(planned_words(side, load))} for side in sides}
    return json.dumps({"sides": servers, "load": load.resolved()}, indent=2)


def _judged(
    texts: tuple[SideText, SideText],
    load: BenchConfig,
    options: CompareOptions,
    given: argparse.Namespace,
    out: Path,
    progress: Progress,
) -> GateResult:
    gate = Gate(out, options, progress, given.max_minutes)
    metrics = metrics_needed(options)
    with ExitStack() as held:
        try:
            if texts[0].is_stored:
                return _against_stored(texts, load, gate, given, held)
            sides = tuple(open_side(text, load, out, held, progress) for text in texts)
        except MeasurementError as error:
            progress.say(str(error))
            lost = Refusal.of(f"a side could not be measured: {error}")
            labels = [plain_text(text.label) for text in texts]
            comparison = Comparison(labels[0], labels[1], 0, options, (), (), (lost,))
            return GateResult(comparison, comparison.exit_code)
        result = gate.run((sides[0], sides[1]), live_measure(load, metrics, progress))
    kept = [text.label for text in texts if text.kind == "url"]
    return _noted(result, [f"{label} was not launched afresh for every run" for label in kept])


def _against_stored(
    texts: tuple[SideText, SideText],
    load: BenchConfig,
    gate: Gate,
    given: argparse.Namespace,
    held: ExitStack,
) -> GateResult:
    metrics = metrics_needed(gate.options)
    stored = stored_runs(texts[0], metrics, given.baselines)
    exit_code = None
    if texts[1].is_stored:
        runs = stored_runs(texts[1], metrics, given.baselines)
    else:
        side = open_side(texts[1], load, gate.out, held, gate.progress)
        alone = gate.run_alone(side, gate.options.pairs or LEAST_RUNS, live_measure(load, metrics, gate.progress))
        runs, exit_code = alone.runs, alone.exit_code
    between = between_of(given.history, stored, metrics)
    comparison = judge_stored(stored, runs, gate.options, between)
    return GateResult(comparison, exit_code if exit_code is not None else comparison.exit_code, stored, runs)


def rebuild(directory: Path, out: Path) -> tuple[SavedComparison, Path]:
    """Render the report of a stored comparison into `out`; also where it is. Raises UsageError for a damaged one."""
    try:
        saved = load_comparison(directory)
        comparison = saved.comparison
        labels = comparison.label_a, comparison.label_b
        of_runs = () if comparison.refusals else runs_sections(saved.runs_a, saved.runs_b, *labels)
    except RunDirectoryError as error:
        raise UsageError(str(error)) from error
    return saved, write_built(build_comparison_report(comparison, saved.reproduce, of_runs), out).html


def report_again(directory: Path, out: Path, *, is_json: bool) -> str:
    """The report of a stored comparison, rendered again; returns the text for stdout. Raises UsageError."""
    saved, _ = rebuild(directory, out)
    if is_json:
        return (directory / COMPARISON_FILE).read_text(encoding="utf-8").rstrip()
    return render(saved.comparison)


def _noted(result: GateResult, notes: Sequence[str]) -> GateResult:
    comparison = dataclasses.replace(result.comparison, notes=(*result.comparison.notes, *notes))
    return dataclasses.replace(result, comparison=comparison)


def options_of(given: argparse.Namespace) -> CompareOptions:
    """The judgement that flags ask for. Raises UsageError naming the flag, its value and its limit."""
    for name, least in (("pairs", 2), ("min_pairs", 2), ("max_pairs", 2)):
        value = getattr(given, name)
        if value is not None and not least <= value <= 100:
            raise UsageError(f"`{name}` is {value} but must be {least} to 100")
    if given.min_pairs > given.max_pairs:
        raise UsageError(f"`min_pairs` is {given.min_pairs} but `max_pairs` is {given.max_pairs}")
    options = gated_options(given.gate)
    try:
        for text in given.require:
            direction_of(Requirement.parse(text).metric)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except KeyError as error:
        raise _no_metric(error) from error
    return dataclasses.replace(
        options,
        min_effect=parse_share(given.min_effect),
        min_pairs=given.min_pairs,
        max_pairs=given.max_pairs,
        pairs=given.pairs,
        inconclusive=given.inconclusive,
        require=tuple(given.require),
        allow=frozenset(given.allow),
    )


def gated_options(more: Sequence[str] | None) -> CompareOptions:
    """The default judgement with more metrics gated. Raises UsageError for one that does not exist."""
    options = CompareOptions()
    try:
        for metric in more or ():
            direction_of(metric)
    except KeyError as error:
        raise _no_metric(error) from error
    gated = tuple(dict.fromkeys((*options.gated, *(more or ()))))
    return dataclasses.replace(options, gated=gated, shown=tuple(each for each in options.shown if each not in gated))


def _no_metric(error: KeyError) -> UsageError:
    return UsageError(f"there is no metric {error}; names are such as ttft_p95_ms or output_tokens_per_s")


def ci_environment(variables: Mapping[str, str]) -> ci.CiEnvironment:
    """What GitHub's variables offer."""
    summary, output = (Path(variables[name]) if name in variables else None for name in GITHUB[1:])
    return ci.CiEnvironment(variables.get("GITHUB_ACTIONS") == "true", summary, output)


def parse_share(text: str) -> float:
    """A percentage as a share. Raises UsageError.

    >>> parse_share("5%"), parse_share("7.5")
    (0.05, 0.075)
    """
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not LEAST_EFFECT <= share <= 1:
        raise UsageError(f"`min_effect` is {text!r} but must be {LEAST_EFFECT:.0%} to 100%")
    return share


def render(comparison: Comparison) -> str:
    """The verdict and the table of metrics, as text."""
    line = verdict_line(comparison)
    parts = [f"{line.word}: {line.sentence}", *(f"  {reason}" for reason in line.reasons)]
    if comparison.metrics:
        parts += ["", render_table(metrics_table(comparison))]
    return "\n".join(parts)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
