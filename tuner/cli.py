"""`tgi-tune`: find launcher settings for a load, prove the gain, and serve them."""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen import settings
from loadgen.config import BenchConfig
from loadgen.errors import UsageError
from loadgen.program import Command, Program
from tuner.export import BEST_FILE, FORMATS
from tuner.plan_cli import add_plan_flags, plan
from tuner.prepare import NOT_LOAD, STUDIES, Prepared, prepare, stored
from tuner.simulate_cli import add_simulate_flags, simulate
from tuner.storage_cli import add_storage_flags, storage

EXIT_CODES = """exit codes:
  0         done: better settings, or "defaults are as good"
  1         no configuration meets every limit
  2         usage, or a file that is missing or wrong
  3         not decided
  4         could not measure: invalid runs, the load generator failed, disk full
  130, 143  interrupted, terminated (the same command continues the study)"""

CHECKED_POINTS = 1_000


def main(argv: Sequence[str] | None = None) -> int:
    return Program(
        "tgi-tune",
        "Find launcher settings for a load, prove the gain, and serve them.",
        EXIT_CODES,
        COMMANDS,
        when_stopped="stopped; the same command continues the study",
    ).main(argv)


def _add_study_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that takes a space."""
    parser.add_argument("space", nargs="?", type=Path, metavar="SPACE.toml", help="Study, space, load and limits.")
    parser.add_argument(
        "--model-id", metavar="ID", help="Hub id, local directory or preset:NAME. Default preset:tiny-llama."
    )
    parser.add_argument("--study", metavar="NAME", help="Folder under studies/. Default from model, space and load.")
    parser.add_argument("--storage", metavar="URL", help="journal, journal:PATH, sqlite:PATH, postgresql://, grpc://.")
    parser.add_argument(
        "--trials", type=int, metavar="N", help="Configurations launched, the defaults included. Default 40."
    )
    parser.add_argument("--max-hours", type=float, metavar="H", help="Stop searching after this long.")
    parser.add_argument("--sampler", metavar="NAME", help="auto, tpe, gp, random, qmc, grid, nsga2, coordinate.")
    parser.add_argument("--sampler-seed", type=int, metavar="N", help="Seed of the sampler. Default 0.")
    parser.add_argument("--guide", metavar="HOW", help="auto, off, rank, gp: whether the simulator proposes.")
    parser.add_argument(
        "--noise-runs", type=int, metavar="N", help="Runs of the defaults first; 0 for none. Default 4."
    )
    parser.add_argument("--finalists", type=int, metavar="K", help="Best configurations to confirm. Default 3.")
    parser.add_argument("--rounds", type=int, metavar="N", help="Confirming launches of each; 0 for none. Default 5.")
    parser.add_argument(
        "--reuse", action="store_true", help="Take what other studies measured under this load on this kind of device."
    )
    parser.add_argument("--quick", action="store_true", help="--noise-runs 2 --finalists 2 --rounds 3.")
    _add_output_flags(parser)
    settings.add_flags(parser, BenchConfig, leave_out=NOT_LOAD)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print what was found as JSON.")
    parser.add_argument("--dry-run", action="store_true", help="Print the exact commands; launch nothing.")


def _add_stored_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that takes a study that exists."""
    parser.add_argument("--study", metavar="NAME", help="Folder under studies/. Default the newest.")
    _add_output_flags(parser)


def _check(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    prepared = prepare(given)
    print(json.dumps(plan_of(prepared), indent=2) if given.json or given.dry_run else render_plan(plan_of(prepared)))
    return 0


def _noise(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from tuner import noise

    prepared = prepare(given)
    if given.dry_run:
        return _print_plan(prepared)
    with _opened(prepared) as search:
        floor = search.measure_noise()
    rounds = prepared.config.confirm.rounds
    if given.json:
        deviations = dict(floor.deviations) if floor is not None else {}
        smallest = floor.smallest_gain(search.objective.maximize, rounds) if floor is not None else None
        print(json.dumps({"runs": floor.runs if floor else 0, "deviations": deviations, "smallest_gain": smallest}))
    else:
        print(noise.render(floor, search.objective.maximize, rounds))
        for name, deviation in (floor.deviations if floor is not None else {}).items():
            print(f"  {name:>24}  {100 * deviation:5.1f} %")
    return 0 if floor is not None else 3


def _run(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    prepared = prepare(given)
    if given.dry_run:
        return _print_plan(prepared)
    from tuner.run_lock import run_lock

    with run_lock(prepared.folder), _opened(prepared) as search:
        search.bench.progress.say(render_plan(plan_of(prepared)))
        results = search.run()
        return _conclude(search, results, prepared, is_json=given.json)


def _worker(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from tuner.shared import joined

    prepared = joined(given.study, given.storage, STUDIES)
    if given.dry_run:
        return _print_plan(prepared)
    with _opened(prepared, is_leader=False) as search:
        results = search.run()
    print(f"{len(results)} trials are told in {search.folder}", file=sys.stderr)
    return 0


def _confirm(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    prepared = stored(given.study)
    if given.dry_run:
        return _print_plan(prepared)
    from tuner.run_lock import run_lock

    with run_lock(prepared.folder), _opened(prepared) as search:
        results = search.results()
        if not any(result.number == 0 for result in results):
            raise UsageError(f"{prepared.folder} has no measured defaults yet; `tgi-tune run` makes them")
        return _conclude(search, results, prepared, is_json=given.json)


def _report(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    prepared = stored(given.study)
    if given.dry_run:
        print(prepared.folder / "report.html")
        return 0
    with _opened(prepared, is_leader=False) as search:
        paths = _write_report(search, prepared)
    print(json.dumps({"report": str(paths)}) if given.json else str(paths))
    return 0


def _conclude(search: Any, results: Sequence[Any], prepared: Prepared, *, is_json: bool) -> int:
    from tuner.confirm import Confirmation, confirm
    from tuner.drift import drift_of
    from tuner.quality import QualityGuard
    from tuner.study_folder import ANCHORS
    from tuner.validate import compared
    from tuner.verdict import render_table, write_artefacts

    baseline = next(result for result in results if result.number == 0)
    section = prepared.config.confirm
    drift = drift_of(search.files.results(ANCHORS), search.files.noise(), search.objective)
    if drift is not None and drift.is_real:
        search.files.note("drift", str(drift))
    known = drift.corrected(results) if drift is not None else results
    finalists = search.finalists(known)[: section.finalists]
    guard = QualityGuard(prepared.config.quality, search.bench, baseline, search.folder / "quality")
    is_confirmed = bool(section.rounds and finalists)
    if is_confirmed:
        confirmation = confirm(search, baseline, finalists, section.rounds, guard)
    else:
        candidates = [result for result in (*finalists[:1], baseline) if result.is_feasible]
        winner = max(candidates, key=lambda each: search.objective.merit(each.value, each.second), default=None)
        sentence = "unconfirmed: " + (f"trial {winner.number} measured best" if winner else "nothing meets every limit")
        confirmation = Confirmation(winner, None, {}, sentence)
    verdict = write_artefacts(
        search,
        results,
        confirmation,
        is_confirmed=is_confirmed and confirmation.winner is not None,
        guard_off=guard.off,
    )
    compared(search.folder, results, prepared.load)
    report = _write_report(search, prepared)
    print(json.dumps(verdict, indent=2) if is_json else render_table(search, results, confirmation))
    print(f"study: {search.folder}\nreport: {report}", file=sys.stderr)
    return 0 if confirmation.winner is not None else 1


def _write_report(search: Any, prepared: Prepared) -> Path:
    from reports.report import write_built
    from reports.study_report import build_study_report
    from tuner.confirm import Confirmation
    from tuner.present import study_data
    from tuner.verdict import read_verdict, verdict_of

    verdict = read_verdict(prepared.folder)
    if not verdict:
        unfinished = Confirmation(None, None, {}, "the study is under way: nothing is confirmed yet")
        verdict = {**verdict_of(search, search.results(), unfinished, is_confirmed=False)}
    commands = (
        f"tgi-tune run --study {prepared.name}",
        f"tgi-tune serve --study {prepared.name}",
        f"studies/{prepared.name}/reproduce.sh",
    )
    data = study_data(prepared.folder, verdict, search.space.parameters, commands)
    return write_built(build_study_report(data), prepared.folder).html


def plan_of(prepared: Prepared) -> dict[str, Any]:
    """What a study would do: its space, what cannot act, its launches and hours, and the exact commands."""
    from tuner.derive import fixed_that_cannot_act
    from tuner.estimate import estimate, num_trials
    from tuner.identity import params_of
    from tuner.objective import Objective
    from tuner.prepare import cannot_act_in
    from tuner.search import median_seconds
    from tuner.space import SearchSpace, known_settings, server_config
    from tuner.study_folder import TRIALS, StudyFolder
    from tuner.targets import launch_of

    config, load = prepared.config, prepared.load
    params = params_of(config)
    fixed = {"model_id": config.server.model_id, **config.server.fixed}
    baseline = server_config(fixed)
    space = SearchSpace.of(params, config.forbid, known_settings())
    inert = {**fixed_that_cannot_act(config.server.fixed), **cannot_act_in(config, load)}
    searched = [each for each in space.parameters if each.name not in inert]
    trials = num_trials(config.study, len(searched))
    known_s = median_seconds(StudyFolder(prepared.folder).results(TRIALS))
    found = estimate(config, load, trials) if known_s is None else estimate(config, load, trials).at(known_s)
    launch = launch_of(config.server, baseline, prepared.folder)
    return {
        "study": str(prepared.folder),
        "objective": list(Objective.of(config.objective).metrics),
        "limits": [str(limit) for limit in Objective.of(config.objective).limits],
        "launches": found.launches,
        "seconds_each": round(found.seconds_each, 1),
        "hours": round(found.hours, 2),
        "plan": str(found),
        "baseline": list(launch.command),
        "load": load.load_description(),
        "space": {each.name: params[each.name].model_dump(mode="json", exclude_defaults=True) for each in searched},
        "cannot_act": inert,
        "configurations": space.size(),
        "impossible_share": round(impossible_share(space, fixed), 3),
    }


def impossible_share(space: Any, fixed: dict[str, Any]) -> float:
    """The share of the space that a rule of the launcher or of the file refuses, by quasi-random points."""
    from scipy.stats import qmc

    from tuner.errors import SpaceError
    from tuner.resolve import resolved
    from tuner.space import server_config

    points = qmc.Halton(len(space.parameters), seed=0).random(CHECKED_POINTS) if space.parameters else []
    refused = 0
    for point in points:
        values = resolved({**fixed, **space.at([float(share) for share in point], fixed)})
        try:
            server_config(values)
        except SpaceError:
            refused += 1
            continue
        refused += space.why_forbidden(values) is not None
    return refused / max(1, len(points))


def render_plan(plan: dict[str, Any]) -> str:
    """The plan for people."""
    lines = [f"study {plan['study']}: {plan['plan']}", f"towards {' and '.join(plan['objective'])}"]
    lines += [f"  within {limit}" for limit in plan["limits"]]
    size = plan["configurations"]
    lines.append(
        f"space: {f'{size:,} configurations' if size else 'continuous'}, {plan['impossible_share']:.0%} impossible"
    )
    for name, section in plan["space"].items():
        known = {key: value for key, value in section.items() if key != "type"}
        lines.append(f"  {name}: {section['type']} " + ", ".join(f"{key} {value}" for key, value in known.items()))
    lines += [f"`{name}` cannot act and is not searched: {why}" for name, why in plan["cannot_act"].items()]
    return "\n".join(lines)


def _print_plan(prepared: Prepared) -> int:
    print(json.dumps(plan_of(prepared), indent=2))
    return 0


def _add_worker_flags(parser: argparse.ArgumentParser) -> None:
    _add_stored_flags(parser)
    parser.add_argument("--storage", metavar="URL", help="Where the study is kept, if its folder is not here.")


def _add_export_flags(parser: argparse.ArgumentParser) -> None:
    _add_stored_flags(parser)
    parser.add_argument("--as", dest="format", choices=FORMATS, default="toml", help="Default toml.")
    parser.add_argument("--trial", type=int, metavar="N", help="Another trial than the winner.")
    parser.add_argument("--image", metavar="IMAGE", help="Of docker and k8s. Default TGI's.")
    parser.add_argument(
        "--infeasible", action="store_true", help="Export what misses limits least, if nothing meets them."
    )


def _export(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from tuner.export import IMAGE, render
    from tuner.study_folder import TRIALS, StudyFolder
    from tuner.verdict import comments_of, read_verdict

    prepared = stored(given.study)
    verdict = read_verdict(prepared.folder)
    if not verdict:
        raise UsageError(f"{prepared.folder} has no verdict yet: finish it with `tgi-tune run` or `tgi-tune confirm`")
    number = given.trial if given.trial is not None else verdict["winner"]
    if number is None and given.infeasible:
        number = verdict["nearest"]
    if number is None:
        print("tgi-tune: no configuration meets every limit; --infeasible exports the nearest", file=sys.stderr)
        return 1
    trial = next((each for each in StudyFolder(prepared.folder).results(TRIALS) if each.number == number), None)
    if trial is None:
        raise UsageError(f"{prepared.folder} has no trial {number}")
    told = {**trial.settings, **({"tuned_by": verdict["tuned_by"]} if number == verdict["winner"] else {})}
    text = render(given.format, told, comments_of({**verdict, "winner": number}), given.image or IMAGE)
    print(
        json.dumps({"format": given.format, "text": text}) if given.json else text, end="" if not given.json else "\n"
    )
    return 0


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--study", metavar="NAME", help="Folder under studies/. Default the newest.")
    parser.add_argument("--unconfirmed", action="store_true", help="Serve a configuration that was never confirmed.")
    parser.add_argument("--dry-run", action="store_true", help="Print the command and start nothing.")
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="More flags for the launcher, after --."
    )


def _serve(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    """Become the launcher, on the study's best configuration."""
    from loadgen.launch import find_launcher

    best = find_best(STUDIES, given.study)
    content = tomllib.loads(best.read_text())
    is_confirmed = str(content.get("tuned_by", "")).partition("?")[0].endswith("/confirmed")
    if not is_confirmed and not given.unconfirmed:
        raise UsageError(f"{best} was never confirmed; run `tgi-tune run` with --rounds, or give --unconfirmed")
    extra = given.flags[1:] if given.flags[:1] == ["--"] else given.flags
    command = [find_launcher(), "--config-file", str(best), *extra]
    if given.dry_run:
        print(" ".join(command))
        return 0
    return os.execv(command[0], command)


def find_best(studies: Path, name: str | None) -> Path:
    """The `best.toml` of a study, the newest where none is named. Raises UsageError."""
    if name is not None:
        best = studies / name / BEST_FILE
        if not best.exists():
            raise UsageError(f"{best} does not exist: the study is unknown or has no configuration to serve")
        return best
    found = sorted(studies.glob(f"*/{BEST_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"no study under {studies}/ has a configuration to serve; `tgi-tune run` makes one")
    return found[-1]


def _opened(prepared: Prepared, *, is_leader: bool = True) -> Any:
    """The search of a study, its standing servers gone when it is left."""
    from loadgen.progress import open_progress
    from tuner.prepare import open_search

    return open_search(prepared, open_progress(), is_leader=is_leader)


COMMANDS = {
    "check": Command("Check a space: size, plan, hours, knobs that cannot act.", _add_study_flags, _check),
    "noise": Command("Measure how much one launch differs from the next.", _add_study_flags, _noise),
    "run": Command("Search, confirm, write best.toml; continues a study that exists.", _add_study_flags, _run),
    "worker": Command("Join a study from another process or machine.", _add_worker_flags, _worker),
    "storage": Command("Serve a database to workers on other machines.", add_storage_flags, storage),
    "confirm": Command("Relaunch the finalists beside the defaults, and judge.", _add_stored_flags, _confirm),
    "report": Command("Write the report of a study from what is stored.", _add_stored_flags, _report),
    "export": Command("Print the settings for whoever launches them.", _add_export_flags, _export),
    "serve": Command("Serve the best configuration of a study.", _add_serve_flags, _serve),
    "simulate": Command("Predict configurations in virtual time.", add_simulate_flags, simulate),
    "plan": Command("Replicas for a rate and limits.", add_plan_flags, plan),
}

if __name__ == "__main__":
    sys.exit(main())
