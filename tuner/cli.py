"""`tgi-tune`: find launcher settings for a load, and serve them."""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen import settings
from loadgen.config import BenchConfig
from loadgen.datasets.lengths import Lengths
from loadgen.errors import UsageError
from loadgen.program import Command, Program
from tuner.config import TuneConfig, study_name
from tuner.export import BEST_FILE

EXIT_CODES = """exit codes:
  0         done: better settings, or "defaults are as good"
  1         no configuration meets every limit
  2         usage, or a file that is missing or wrong
  3         not decided
  4         could not measure: invalid runs, the load generator failed, disk full
  130, 143  interrupted, terminated (the same command continues the study)"""

STUDIES = Path("studies")

# The load of a study where nothing else is said: near saturation of the embedded preset, prompts that fill budgets.
DEFAULT_LOAD: Mapping[str, Any] = {
    "mode": "closed",
    "concurrency": 16,
    "warmup": 2.0,
    "duration": 12.0,
    "input_tokens": "uniform:128,512",
    "output_tokens": "32",
}
# The server belongs to the study, not to the load.
NOT_LOAD = ("url", "server", "model_id", "model", "ready_timeout", "seed", "label")


def main(argv: Sequence[str] | None = None) -> int:
    return Program(
        "tgi-tune",
        "Find launcher settings for a load, and serve them.",
        EXIT_CODES,
        COMMANDS,
        LATER,
        when_stopped="stopped; the same command continues the study",
    ).main(argv)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("space", nargs="?", type=Path, metavar="SPACE.toml", help="Study, space, load and limits.")
    parser.add_argument(
        "--model-id", metavar="ID", help="Hub id, local directory or preset:NAME. Default preset:tiny-llama."
    )
    parser.add_argument("--study", metavar="NAME", help="Folder under studies/. Default from model, space and load.")
    parser.add_argument(
        "--trials", type=int, metavar="N", help="Configurations launched, the defaults included. Default 20."
    )
    parser.add_argument("--max-hours", type=float, metavar="H", help="Stop searching after this long.")
    parser.add_argument("--sampler-seed", type=int, metavar="N", help="Seed of the sampler. Default 0.")
    parser.add_argument("--finalists", type=int, metavar="K", help="Best configurations to confirm. Default 2.")
    parser.add_argument("--rounds", type=int, metavar="N", help="Confirming launches of each; 0 for none. Default 3.")
    parser.add_argument("--json", action="store_true", help="Print the verdict as JSON.")
    parser.add_argument("--dry-run", action="store_true", help="Print plan, space and commands; launch nothing.")
    settings.add_flags(parser, BenchConfig, leave_out=NOT_LOAD)


def _run(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from loadgen.progress import open_progress
    from tuner.evaluate import Bench
    from tuner.search import Search, digest_of
    from tuner.space import derived_params

    config = read_config(given)
    load = settings.load(BenchConfig, {**DEFAULT_LOAD, **config.load, "model_id": config.server.model_id})
    config = with_derived_lengths(config, load)
    bench = Bench(load, config.server.ready_timeout_s, open_progress())
    params = config.param or derived_params(config.server.fixed)
    name = config.study.name or study_name(config.server.model_id, digest_of(config, params, bench))
    folder = STUDIES / name
    if given.dry_run:
        return _print_plan(config, load, params, folder)
    search = Search.open(folder, config, bench)
    for setting in search.cannot_act:
        bench.progress.say(f"`{setting}` has one value here and is not searched")
    bench.progress.say(
        f"study {name}: {config.study.trials} launches, then {_confirming(config)} to confirm; in {folder}"
    )
    results = search.run()
    return _conclude(search, results, is_json=given.json)


def read_config(given: argparse.Namespace) -> TuneConfig:
    """The study of a space file and of flags, which win. Raises UsageError naming the key."""
    content = settings.read_toml(given.space) if given.space is not None else {}
    sections: dict[str, dict[str, Any]] = {
        name: dict(content.get(name, {})) for name in ("study", "server", "confirm", "load")
    }
    flags = {
        "study": {
            "name": given.study,
            "trials": given.trials,
            "max_hours": given.max_hours,
            "seed": given.sampler_seed,
        },
        "server": {"model_id": given.model_id},
        "confirm": {"finalists": given.finalists, "rounds": given.rounds},
        "load": {name: getattr(given, name, None) for name in BenchConfig.model_fields if name not in NOT_LOAD},
    }
    for name, values in flags.items():
        sections[name] |= {key: value for key, value in values.items() if value is not None}
    for key in NOT_LOAD:
        if key in sections["load"]:
            raise UsageError(f"`{key}` is no key of [load]: the server belongs to [server]")
    return settings.load(TuneConfig, {**content, **sections})


def with_derived_lengths(config: TuneConfig, load: BenchConfig) -> TuneConfig:
    """Limits of prompt and answer from the load, where neither file nor model fixes them: budgets then have a scale."""
    fixed = config.server.fixed
    if load.workload != "synthetic" or "max_input_tokens" in fixed or "max_total_tokens" in fixed:
        return config
    longest_input = _longest(load.input_tokens)
    longest_output = _longest(load.output_tokens)
    if longest_input is None or longest_output is None:
        return config
    lengths = {"max_input_tokens": longest_input, "max_total_tokens": longest_input + longest_output}
    server = config.server.model_copy(update={"fixed": {**fixed, **lengths}})
    return config.model_copy(update={"server": server})


def _longest(text: str | None) -> int | None:
    lengths = Lengths.parse(text) if text else None
    return lengths.longest if lengths is not None else None


def _print_plan(config: TuneConfig, load: BenchConfig, params: Mapping[str, Any], folder: Path) -> int:
    from tuner.evaluate import command_of
    from tuner.space import server_config

    seconds = load.warmup_s + (load.duration_s or 0.0) + 10.0
    launches = config.study.trials + _confirming(config)
    plan = {
        "study": str(folder),
        "launches": launches,
        "hours": round(launches * seconds / 3600, 2),
        "baseline": command_of(server_config({"model_id": config.server.model_id, **config.server.fixed})),
        "load": load.load_description(),
        "space": {name: section.model_dump(mode="json", exclude_defaults=True) for name, section in params.items()},
    }
    print(json.dumps(plan, indent=2))
    return 0


def _confirming(config: TuneConfig) -> int:
    return config.confirm.rounds * (1 + config.confirm.finalists) if config.confirm.rounds else 0


def _conclude(search: Any, results: Sequence[Any], *, is_json: bool) -> int:
    from tuner.confirm import Confirmation, confirm
    from tuner.search import best_of
    from tuner.verdict import render_table, write_artefacts

    baseline = next(result for result in results if result.number == 0)
    rounds = search.config.confirm.rounds
    finalists = best_of(results)[: search.config.confirm.finalists]
    if rounds and finalists:
        confirmation = confirm(search, baseline, finalists, rounds)
    else:
        candidates = [result for result in (*finalists[:1], baseline) if result.is_feasible]
        winner = max(candidates, key=lambda result: result.value or 0.0, default=None)
        sentence = "unconfirmed: " + (f"trial {winner.number} measured best" if winner else "nothing meets every limit")
        confirmation = Confirmation(winner, None, {}, sentence)
    is_confirmed = bool(rounds and finalists)
    verdict = write_artefacts(search, results, confirmation, is_confirmed=is_confirmed)
    print(json.dumps(verdict, indent=2) if is_json else render_table(search, results, confirmation))
    print(f"study: {search.folder}", file=sys.stderr)
    return 0 if confirmation.winner is not None else 1


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
    if not str(content.get("tuned_by", "")).endswith("/confirmed") and not given.unconfirmed:
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


COMMANDS = {
    "run": Command("Search, confirm, write best.toml; continues a study that exists.", _add_run_flags, _run),
    "serve": Command("Serve the best configuration of a study.", _add_serve_flags, _serve),
}

# Words of the specification that this version does not have, refused by name whatever follows them.
LATER = ("check", "noise", "worker", "confirm", "report", "export", "simulate", "plan")


if __name__ == "__main__":
    sys.exit(main())
