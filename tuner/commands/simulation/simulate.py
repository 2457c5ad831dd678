"""`tgi-tune simulate WORD`. Only `calibrate` and `validate` launch servers."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loadgen.interrupts import noted
from loadgen.program import Command
from loadgen.progress import add_verbosity_flags
from tuner.commands.simulation.simulate_fit import add_calibrate_flags, add_fit_flags, calibrate, fit
from tuner.commands.simulation.simulate_inputs import add_input_flags
from tuner.commands.simulation.simulate_run import add_run_flags, explain, run
from tuner.commands.simulation.simulate_sweep import add_sweep_flags, sweep
from tuner.commands.simulation.simulate_validate import add_validate_flags, validate


@dataclass(frozen=True, slots=True)
class SimulateWord:
    """A subcommand of `tgi-tune simulate`."""

    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


WORDS: Mapping[str, SimulateWord] = {
    "run": SimulateWord("Predict one configuration.", add_run_flags, run),
    "sweep": SimulateWord("Predict many configurations of a space.", add_sweep_flags, sweep),
    "fit": SimulateWord("Fit the cost model to step traces.", add_fit_flags, fit),
    "calibrate": SimulateWord(
        "Launch the bundled server, send designed requests and fit the cost model to its steps. With --url, fit it to "
        "client timings of any running server.",
        add_calibrate_flags,
        calibrate,
    ),
    "validate": SimulateWord(
        "Compare predictions with launches of a study, or with new launches. With --url, compare them with loads on a "
        "running server.",
        add_validate_flags,
        validate,
    ),
    "explain": SimulateWord("Show the time that a configuration spends in each phase.", add_input_flags, explain),
}


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", metavar="WORD", required=True)
    for name, word in WORDS.items():
        subparser = words.add_parser(name, help=word.summary, description=word.summary, allow_abbrev=False)
        word.add_flags(subparser)
        subparser.add_argument("--json", action="store_true", help="Print the result as JSON.")
        add_verbosity_flags(subparser)


def simulate(args: argparse.Namespace, _words: Sequence[str]) -> int:
    with noted("stopped"):
        return WORDS[args.word].run(args)


EXAMPLES = (
    "run --set max_batch_prefill_tokens=2048",
    "sweep space.toml --top 5",
    "calibrate --url http://127.0.0.1:8000 -o cost.json",
)
COMMAND = Command("Predict the metrics of configurations, without a launch.", add_simulate_flags, simulate, EXAMPLES)
