"""`tgi-tune export`: prints the winner's settings for another launcher, or writes Kubernetes Jobs."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadgen.errors import UsageError
from loadgen.program import Command
from loadgen.terminal.flags import OneOf
from tuner.commands.study_flags import add_stored_flags
from tuner.servers.select import server_of
from tuner.study.prepare import PreparedStudy, stored

# Flags of some forms only. `image` belongs to all forms.
OF_SETTINGS, OF_JOBS, OF_LOAD_JOBS, OF_STUDY_JOBS = (
    ("trial", "infeasible", "plan", "prometheus"),
    ("workers", "out"),
    ("url",),
    ("storage",),
)

PROMETHEUS = "http://prometheus.monitoring:9090"

FORM = OneOf.of("FORM", ("toml", "env", "cli", "docker", "compose", "k8s", "load-jobs", "study-jobs"))


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    add_stored_flags(parser)
    parser.add_argument(
        "--as",
        dest="form",
        metavar=FORM,
        default="toml",
        help="Settings: toml (default), env, cli, docker, compose or k8s. Kubernetes Jobs: load-jobs sends the study's "
        "load from several pods; study-jobs runs several workers of the study.",
    )
    parser.add_argument("--trial", type=int, metavar="N", help="Export this trial. Default: the winner.")
    parser.add_argument(
        "--image", metavar="IMAGE", help="Image for docker, compose and k8s, default the server's. Required for Jobs."
    )
    parser.add_argument(
        "--infeasible",
        action="store_true",
        help="If no configuration meets the limits, export the one with the smallest violation.",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="k8s: output of `tgi-tune plan --json`. Adds a KEDA ScaledObject with its numbers of replicas.",
    )
    parser.add_argument(
        "--prometheus", metavar="URL", help=f"k8s with --plan: address of Prometheus. Default: {PROMETHEUS}."
    )
    parser.add_argument("--workers", type=int, metavar="N", help="Jobs: number of pods that send load or search.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Jobs: folder for the kustomization.")
    parser.add_argument("--url", metavar="URL", help="load-jobs: address of the server inside the cluster.")
    parser.add_argument(
        "--storage", metavar="URL", help="study-jobs: grpc://HOST:PORT of `tgi-tune storage`. Default: the study's."
    )


def export(args: argparse.Namespace, _words: Sequence[str]) -> int:
    """Exit code 1 if no configuration meets every limit."""
    prepared = stored(args.study)
    if args.form in JOBS:
        return _write_jobs(args, prepared)
    _refuse(args, (*OF_JOBS, *OF_LOAD_JOBS, *OF_STUDY_JOBS))
    return _export_settings(args, prepared)


def _export_settings(args: argparse.Namespace, prepared: PreparedStudy) -> int:
    from tuner.servers.profiled_server import ProfiledServer
    from tuner.servers.scaled_object import read_plan, scaled_object
    from tuner.study.artefacts import comments_of, read_verdict
    from tuner.study.study_folder import TRIALS, StudyFolder

    if args.plan is not None and args.form != "k8s":
        raise UsageError(f"--plan is not a flag of --as {args.form}: remove it")
    if args.prometheus is not None and args.plan is None:
        raise UsageError("--prometheus needs --plan")
    server = server_of(prepared.config.server)
    if args.form not in server.forms:
        raise UsageError(f"--as is {args.form}, but must be one of {', '.join((*server.forms, *JOBS))} for this server")
    verdict = read_verdict(prepared.folder)
    if not verdict:
        raise UsageError(f"{prepared.folder} has no verdict: finish it with `tgi-tune run` or `tgi-tune confirm`")
    number = args.trial if args.trial is not None else verdict["winner"]
    if number is None and args.infeasible:
        number = verdict["nearest"]
    if number is None:
        print("tgi-tune: no configuration meets every limit: export the nearest with --infeasible", file=sys.stderr)
        return 1
    trial = next((each for each in StudyFolder(prepared.folder).results(TRIALS) if each.number == number), None)
    if trial is None:
        raise UsageError(f"{prepared.folder} has no trial {number}")
    origin = {"tuned_by": verdict["tuned_by"]} if number == verdict["winner"] else {}
    comments = comments_of({**verdict, "winner": number})
    text = server.export(args.form, {**trial.settings, **origin}, comments, args.image)
    if args.plan is not None:
        name = server.profile.name if isinstance(server, ProfiledServer) else "tgi"
        text += scaled_object(name, read_plan(args.plan), args.prometheus or PROMETHEUS)
    if args.json:
        print(json.dumps({"format": args.form, "text": text}))
    else:
        print(text, end="")
    return 0


def _write_jobs(args: argparse.Namespace, prepared: PreparedStudy) -> int:
    """Write the files of a kustomization. Existing files with these names are replaced."""
    if args.image is None or args.out is None or args.workers is None:
        raise UsageError(f"--as {args.form} needs --workers N, --image IMAGE and --out DIR")
    if args.workers < 1:
        raise UsageError(f"--workers is {args.workers}, but must be at least 1")
    _refuse(args, OF_SETTINGS)
    files = JOBS[args.form](args, prepared)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (args.out / name).write_text(text, encoding="utf-8")
    if args.json:
        print(json.dumps({"format": args.form, "files": [str(args.out / name) for name in files]}))
    else:
        print(f"wrote {args.out}: {', '.join(files)}")
    return 0


def _load_jobs(args: argparse.Namespace, prepared: PreparedStudy) -> Mapping[str, str]:
    from tuner.jobs.load_jobs import load_jobs
    from tuner.study.artefacts import load_toml

    _refuse(args, OF_STUDY_JOBS)
    if args.url is None:
        raise UsageError("--as load-jobs needs --url URL, the address of the server inside the cluster")
    text = load_toml(prepared.load, prepared.name)
    return load_jobs(prepared.load, text, args.url, args.workers, args.image)


def _study_jobs(args: argparse.Namespace, prepared: PreparedStudy) -> Mapping[str, str]:
    from tuner.jobs.study_jobs import study_jobs

    _refuse(args, OF_LOAD_JOBS)
    storage = args.storage or prepared.config.study.storage
    return study_jobs(prepared.name, prepared.config, storage, args.workers, args.image)


def _refuse(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises UsageError for a flag that the form does not have."""
    for name in names:
        if getattr(args, name) not in (None, False):
            raise UsageError(f"--{name} is not a flag of --as {args.form}: remove it")


JOBS: Mapping[str, Callable[[argparse.Namespace, PreparedStudy], Mapping[str, str]]] = {
    "load-jobs": _load_jobs,
    "study-jobs": _study_jobs,
}

EXAMPLES = ("--as docker", "--study nightly --as k8s --plan plan.json", "--as env --trial 7")
COMMAND = Command("Print settings for another launcher, or write Jobs.", add_export_flags, export, EXAMPLES)
