"""`tgi-tune export`: the winner's settings for another launcher."""

import argparse
import json
import sys
from collections.abc import Sequence

from loadgen.errors import UsageError
from loadgen.program import Command
from tuner.commands.study_flags import add_stored_flags
from tuner.servers.select import server_of
from tuner.study.prepare import stored


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    add_stored_flags(parser)
    parser.add_argument(
        "--as", dest="form", metavar="FORM", default="toml", help="toml (default), env, cli, docker or k8s."
    )
    parser.add_argument("--trial", type=int, metavar="N", help="Another trial than the winner.")
    parser.add_argument("--image", metavar="IMAGE", help="Image of docker and k8s. Default the server's.")
    parser.add_argument(
        "--infeasible",
        action="store_true",
        help="Export the configuration of the smallest violation if none meets the limits.",
    )


def export(args: argparse.Namespace, _words: Sequence[str]) -> int:
    """Exit code 1 if no configuration meets every limit."""
    from tuner.study.artefacts import comments_of, read_verdict
    from tuner.study.study_folder import TRIALS, StudyFolder

    prepared = stored(args.study)
    server = server_of(prepared.config.server)
    if args.form not in server.forms:
        raise UsageError(f"--as is {args.form}, but this server has {', '.join(server.forms)}")
    verdict = read_verdict(prepared.folder)
    if not verdict:
        raise UsageError(f"{prepared.folder} has no verdict yet: finish it with `tgi-tune run` or `tgi-tune confirm`")
    number = args.trial if args.trial is not None else verdict["winner"]
    if number is None and args.infeasible:
        number = verdict["nearest"]
    if number is None:
        print("tgi-tune: no configuration meets every limit; --infeasible exports the nearest", file=sys.stderr)
        return 1
    trial = next((each for each in StudyFolder(prepared.folder).results(TRIALS) if each.number == number), None)
    if trial is None:
        raise UsageError(f"{prepared.folder} has no trial {number}")
    origin = {"tuned_by": verdict["tuned_by"]} if number == verdict["winner"] else {}
    comments = comments_of({**verdict, "winner": number})
    text = server.export(args.form, {**trial.settings, **origin}, comments, args.image)
    if args.json:
        print(json.dumps({"format": args.form, "text": text}))
    else:
        print(text, end="")
    return 0


COMMAND = Command("Print the settings for another launcher.", add_export_flags, export)
