"""The flags of a comparison as values: its two sides and how it is judged."""

import argparse
import dataclasses
from collections.abc import Sequence

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.gate.sides import SideSpec, check_docker, check_relaunch, read_side
from reports.gate.comparison import MIN_EFFECT, CompareOptions
from reports.gate.requirements import Requirement
from reports.gate.side_run import direction_of


def sides_of(args: argparse.Namespace) -> tuple[SideSpec, SideSpec]:
    """The two sides of a command line. Raises UsageError."""
    words = list(args.sides)
    named: list[str | None] = [None, None]
    for index, command in enumerate((args.server_a, args.server_b)):
        if command is not None:
            named[index] = f"command:{command}"
    if args.against is not None:
        if named[0] is not None:
            raise UsageError("`against` and `server_a` both name side A; give one of them")
        named[0] = f"baseline:{args.against}"
    for index in (0, 1):
        if named[index] is None and words:
            named[index] = words.pop(0)
    if words or None in named:
        raise UsageError(
            "a comparison needs two sides: give A and B, --against NAME and B, or --server-a and --server-b"
        )
    labels, added = (args.label_a, args.label_b), (args.args_a, args.args_b)
    a, b = (read_side("ab"[i], str(named[i]), labels[i], added[i], args.docker_args) for i in (0, 1))
    check_docker((a, b), args.docker_args)
    if a.label == b.label:
        a, b = dataclasses.replace(a, label=f"A: {a.label}"), dataclasses.replace(b, label=f"B: {b.label}")
    if b.is_stored and not a.is_stored:
        raise UsageError("side B is stored and A is not; give the stored side first: it is the baseline")
    check_relaunch((a, b), args.no_relaunch)
    return a, b


def check_contention(is_adjusted: bool, sides: Sequence[SideSpec]) -> None:
    """Raises UsageError for an adjustment to equal contention if a server is not launched as a process here."""
    other = [side for side in sides if side.kind in ("url", "image", "stored", "baseline")]
    if is_adjusted and other:
        raise UsageError(
            f"`equal_contention` is set but side {other[0].letter.upper()} ({other[0].name}) is not a process of "
            "this machine that is started for the comparison; leave it out"
        )


def options_of(args: argparse.Namespace, load: BenchConfig) -> CompareOptions:
    """How to judge, from the flags. The validity rate of structured answers is gated if the load has any.

    Raises UsageError naming the flag, its value and its limit.
    """
    for name, least in (("pairs", 2), ("min_pairs", 2), ("max_pairs", 2)):
        value = getattr(args, name)
        if value is not None and not least <= value <= 100:
            raise UsageError(f"`{name}` is {value} but must be {least} to 100")
    if args.min_pairs > args.max_pairs:
        raise UsageError(f"`min_pairs` is {args.min_pairs} but `max_pairs` is {args.max_pairs}")
    options = gated_options([*(args.gate or ()), *(("structured_validity",) if load.structured else ())])
    try:
        for text in args.require:
            direction_of(Requirement.parse(text).metric)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except KeyError as error:
        raise unknown_metric(error) from error
    return dataclasses.replace(
        options,
        min_effect=parse_percentage(args.min_effect),
        min_pairs=args.min_pairs,
        max_pairs=args.max_pairs,
        pairs=args.pairs,
        inconclusive=args.inconclusive,
        require=tuple(args.require),
        allow=frozenset(args.allow),
        equal_contention=args.equal_contention,
    )


def gated_options(more: Sequence[str] | None) -> CompareOptions:
    """The default options with more metrics gated. Raises UsageError for an unknown metric."""
    options = CompareOptions()
    try:
        for metric in more or ():
            direction_of(metric)
    except KeyError as error:
        raise unknown_metric(error) from error
    gated = tuple(dict.fromkeys((*options.gated, *(more or ()))))
    return dataclasses.replace(options, gated=gated, shown=tuple(each for each in options.shown if each not in gated))


def unknown_metric(error: KeyError) -> UsageError:
    return UsageError(f"unknown metric {error}; metrics are named like ttft_p95_ms or output_tokens_per_s")


def parse_percentage(text: str) -> float:
    """A percentage as a fraction. Raises UsageError.

    >>> parse_percentage("5%"), parse_percentage("7.5")
    (0.05, 0.075)
    """
    try:
        fraction = float(text.removesuffix("%")) / 100
    except ValueError:
        fraction = 0.0
    if not MIN_EFFECT <= fraction <= 1:
        raise UsageError(f"`min_effect` is {text!r} but must be {MIN_EFFECT:.0%} to 100%")
    return fraction
