"""`tgi-bench import`: runs of other load generators as run directories, with their report."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.commands.load_series import SWEEP_FILE, render_series
from loadgen.commands.present import show_runs
from loadgen.errors import UsageError
from loadgen.imports.aiperf import is_aiperf, is_aiperf_total, read_aiperf, refuse_total
from loadgen.imports.guidellm import is_guidellm, read_guidellm
from loadgen.imports.imported_run import ImportedLoad, ImportedRun
from loadgen.imports.vllm_bench import is_vllm_bench, read_vllm_bench
from loadgen.run_directory import new_run_id
from reports.metrics.summary import analyse_run
from reports.metrics.sweep import LoadPoint, Sweep
from reports.pages.run_pages import write_run_page
from reports.pages.sweep_page import build_sweep_report, points_table, sweep_json, verdict
from reports.renderers.write import write_report
from reports.run_store import SCHEMA_VERSION, write_json

ATTAINMENT = 0.95


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="Results of vllm bench serve (--save-result --save-detailed), benchmarks.json of guidellm, or "
        "profile_export.jsonl of aiperf.",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="Directory in which each run gets a run directory. Default runs/<id>."
    )
    parser.add_argument("--concurrency", type=int, metavar="N", help="Users of a file that does not state its load.")
    parser.add_argument("--rate", type=float, metavar="R", help="Requests/s of a file that does not state its load.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of the table.")


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Write a directory for each run, and one report: a sweep page if the runs differ in their load alone."""
    out: Path = args.out or Path("runs") / new_run_id()
    found = [(each, path) for path in args.files for each in read_file(path, stated_load(args))]
    directories = _write(found, out)
    for each, path in found:
        print(f"{path}: {each.tool}, {each.load.name}; not in the file: {'; '.join(each.lacks)}", file=sys.stderr)
    quantity = _varied([each for each, _ in found])
    if quantity is None:
        return show_runs(directories, out if len(directories) > 1 else directories[0], is_json=args.json)
    return _show_sweep(quantity, found, directories, out, words, is_json=args.json)


def stated_load(args: argparse.Namespace) -> ImportedLoad | None:
    """The load of the flags; None without them. Raises UsageError."""
    if args.concurrency is not None and args.rate is not None:
        raise UsageError("`concurrency` and `rate` exclude each other")
    for name in ("concurrency", "rate"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UsageError(f"`{name}` is {value} but must be above 0")
    if args.rate is not None:
        return ImportedLoad(rate=args.rate, mode="poisson")
    return None if args.concurrency is None else ImportedLoad(concurrency=args.concurrency)


def read_file(path: Path, load: ImportedLoad | None) -> list[ImportedRun]:
    """The runs of a file, by its content. Raises UsageError for an unknown, incomplete or damaged one."""
    values = _values(path)
    first = values[0]
    try:
        if is_aiperf(first):
            return read_aiperf(values, str(path), load)
        if is_aiperf_total(first):
            raise refuse_total(str(path))
        if is_guidellm(first):
            return read_guidellm(first, str(path))
        if is_vllm_bench(first):
            return [each for value in values for each in read_vllm_bench(value, str(path))]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"{path}: not as its tool writes it ({type(error).__name__}: {error})") from error
    raise UsageError(
        f"{path}: not a result of vllm bench serve, guidellm (benchmarks.json) or aiperf (profile_export.jsonl)"
    )


def _values(path: Path) -> list[Mapping[str, Any]]:
    """The JSON value of a file, or one for each line. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        values = [json.loads(text)]
    except ValueError:
        try:
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise UsageError(f"{path}: neither JSON nor lines of JSON ({error})") from error
    if not values or not all(isinstance(value, Mapping) for value in values):
        raise UsageError(f"{path}: it holds no JSON objects")
    return values


def _write(found: Sequence[tuple[ImportedRun, Path]], out: Path) -> list[Path]:
    """A directory for each run; equal loads are numbered."""
    seen: Counter[str] = Counter()
    directories = []
    for each, path in found:
        seen[each.load.name] += 1
        number = seen[each.load.name]
        directories.append(out / (each.load.name + (f"-again{number - 1}" if number > 1 else "")))
        each.write(directories[-1], path)
    return directories


def _varied(runs: Sequence[ImportedRun]) -> str | None:
    """The quantity that differs between all runs, of one tool; None if there is none."""
    for quantity in ("concurrency", "rate"):
        loads = [getattr(each.load, quantity) for each in runs]
        is_one_tool = len({(each.tool, each.model, each.load.mode) for each in runs}) == 1
        if len(loads) > 1 and is_one_tool and None not in loads and len(set(loads)) == len(loads):
            return quantity
    return None


def _show_sweep(
    quantity: str,
    found: Sequence[tuple[ImportedRun, Path]],
    directories: Sequence[Path],
    out: Path,
    words: Sequence[str],
    *,
    is_json: bool,
) -> int:
    amounts = [float(getattr(each.load, quantity)) for each, _ in found]
    ascending = sorted(zip(amounts, directories, strict=True))
    points = tuple(LoadPoint(amount, (analyse_run(directory),)) for amount, directory in ascending)
    sweep = Sweep(quantity, points, ATTAINMENT, ("tgi-bench", *words))
    content = {"schema_version": SCHEMA_VERSION, **sweep_json(sweep)}
    write_json(out / SWEEP_FILE, content)
    for point in points:
        write_run_page(point.first)
    report = write_report(build_sweep_report(sweep), out)
    print(f"report: {report.html}", file=sys.stderr)
    text = render_series(verdict(sweep), points_table(sweep))
    print(json.dumps(content, indent=2, allow_nan=False) if is_json else text)
    return 0
