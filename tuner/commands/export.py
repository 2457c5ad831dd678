"""`tgi-tune export`: prints the winner's settings for another launcher, or writes Kubernetes Jobs."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.errors import UsageError
from loadgen.program import Command
from loadgen.terminal.flags import OneOf
from tuner.commands.study_flags import add_stored_flags
from tuner.servers.nginx_balancer import LINES, nginx_balancer
from tuner.servers.select import server_of
from tuner.study.prepare_study import PreparedStudy, stored

if TYPE_CHECKING:
    from tuner.servers.autoscaling import Scaling

# Flags of some forms only. `image` belongs to all forms.
OF_BALANCER = ("replica", "policy")
OF_SETTINGS, OF_JOBS, OF_LOAD_JOBS, OF_STUDY_JOBS = (
    ("trial", "infeasible", "plan", "prometheus", "autoscaler"),
    ("workers",),
    ("url",),
    ("storage",),
)

HELM, NGINX = "helm", "nginx"
REPLICA = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}")
PROMETHEUS = "http://prometheus.monitoring:9090"

POLICY = OneOf.of("POLICY", tuple(LINES))
AUTOSCALER = OneOf.of("KIND", ("keda", "hpa"))
FORM = OneOf.of("FORM", ("toml", "env", "cli", "docker", "compose", "k8s", "helm", "nginx", "load-jobs", "study-jobs"))


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    add_stored_flags(parser)
    parser.add_argument(
        "--as",
        dest="form",
        metavar=FORM,
        default="toml",
        help="Format. Settings of the winner: toml (default), env, cli, docker, compose, k8s, helm. Configuration of a "
        "load balancer: nginx. Kubernetes Jobs: load-jobs sends the study's load from several pods; study-jobs runs "
        "several workers of the study.",
    )
    parser.add_argument("--trial", type=int, metavar="N", help="Number of the trial to export. Default: the winner.")
    parser.add_argument(
        "--image",
        metavar="IMAGE",
        help="Container image, for docker, compose, k8s and helm; default the server's. Required for Jobs.",
    )
    parser.add_argument(
        "--infeasible",
        action="store_true",
        help="If no configuration meets all limits, export the one that misses them by the least.",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="k8s, helm: output of `tgi-tune plan --json`. Adds an autoscaler with the plan's numbers of replicas.",
    )
    parser.add_argument(
        "--autoscaler",
        metavar=AUTOSCALER,
        help="With --plan: keda (a ScaledObject, default) or hpa (a HorizontalPodAutoscaler).",
    )
    parser.add_argument(
        "--prometheus", metavar="URL", help=f"With --plan and keda: URL of Prometheus. Default: {PROMETHEUS}."
    )
    parser.add_argument(
        "--replica",
        action="append",
        metavar="HOST:PORT",
        help="nginx: address of a server behind the balancer. Repeatable. Needs no study.",
    )
    parser.add_argument(
        "--policy",
        metavar=POLICY,
        help=f"nginx: rule that selects a server for a request: {', '.join(LINES)}. Default least_loaded.",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="Jobs: number of pods, each with one load generator or one worker."
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="helm: folder to write the chart to. Jobs: folder to write the kustomization to.",
    )
    parser.add_argument("--url", metavar="URL", help="load-jobs: URL of the server inside the cluster.")
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="study-jobs: grpc://HOST:PORT of `tgi-tune storage`. Default: the study's storage.",
    )


def export(args: argparse.Namespace, _words: Sequence[str]) -> int:
    """Exit code 1 if no configuration meets every limit."""
    if args.form == NGINX:
        return _print_balancer(args)
    _refuse(args, OF_BALANCER)
    prepared = stored(args.study)
    if args.form in JOBS:
        return _write_jobs(args, prepared)
    _refuse(args, (*OF_JOBS, *OF_LOAD_JOBS, *OF_STUDY_JOBS))
    return _export_settings(args, prepared)


def _export_settings(args: argparse.Namespace, prepared: PreparedStudy) -> int:
    from tuner.servers.helm_chart import helm_chart
    from tuner.servers.k8s_manifest import k8s_manifest
    from tuner.study.artefacts import comments_of, read_verdict
    from tuner.study.study_folder import TRIALS, StudyFolder

    _check_settings_flags(args)
    server = server_of(prepared.config.server)
    if args.form not in (*server.forms, HELM):
        raise UsageError(
            f"--as is {args.form}, but must be one of {', '.join((*server.forms, HELM, *JOBS))} for this server"
        )
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
    settings = {**trial.settings, **origin}
    if args.form == HELM:
        return _write_files(args, helm_chart(server.container(settings, comments, args.image), _scaling(args)))
    if args.form == "k8s":
        text = k8s_manifest(server.container(settings, comments, args.image), _scaling(args))
    else:
        text = server.export(args.form, settings, comments, args.image)
    if args.json:
        print(json.dumps({"format": args.form, "text": text}))
    else:
        print(text, end="")
    return 0


def _print_balancer(args: argparse.Namespace) -> int:
    _refuse(args, (*OF_SETTINGS, *OF_JOBS, *OF_LOAD_JOBS, *OF_STUDY_JOBS, "out", "image"))
    if not args.replica:
        raise UsageError("--as nginx needs --replica HOST:PORT for each server")
    for replica in args.replica:
        if REPLICA.fullmatch(replica) is None:
            raise UsageError(f"--replica is {replica!r}, but must be HOST:PORT")
    text = nginx_balancer(args.policy or "least_loaded", args.replica)
    print(json.dumps({"format": NGINX, "text": text}) if args.json else text, end="\n" if args.json else "")
    return 0


def _check_settings_flags(args: argparse.Namespace) -> None:
    if args.plan is not None and args.form not in ("k8s", HELM):
        raise UsageError(f"--plan is not a flag of --as {args.form}: remove it")
    for name in ("prometheus", "autoscaler"):
        if getattr(args, name) is not None and args.plan is None:
            raise UsageError(f"--{name} needs --plan")
    if args.prometheus is not None and args.autoscaler == "hpa":
        raise UsageError("--prometheus is not a flag of --autoscaler hpa: remove it")
    if args.form == HELM and args.out is None:
        raise UsageError("--as helm needs --out DIR, the folder of the chart")
    if args.form != HELM:
        _refuse(args, ("out",))


def _scaling(args: argparse.Namespace) -> "Scaling | None":
    """The autoscaler that the flags request."""
    from tuner.servers.autoscaling import Scaling, read_plan

    if args.plan is None:
        return None
    return Scaling(args.autoscaler or "keda", read_plan(args.plan), args.prometheus or PROMETHEUS)


def _write_jobs(args: argparse.Namespace, prepared: PreparedStudy) -> int:
    """Write the files of a kustomization. Existing files with these names are replaced."""
    if args.image is None or args.out is None or args.workers is None:
        raise UsageError(f"--as {args.form} needs --workers N, --image IMAGE and --out DIR")
    if args.workers < 1:
        raise UsageError(f"--workers is {args.workers}, but must be at least 1")
    _refuse(args, OF_SETTINGS)
    return _write_files(args, JOBS[args.form](args, prepared))


def _write_files(args: argparse.Namespace, files: Mapping[str, str]) -> int:
    for name, text in files.items():
        path = args.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
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

EXAMPLES = ("--as docker", "--study nightly --as helm --plan plan.json --out chart", "--as env --trial 7")
COMMAND = Command(
    "Print the settings for another launcher, or write files for Kubernetes.", add_export_flags, export, EXAMPLES
)
