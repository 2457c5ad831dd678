"""`tgi-tune`: find launcher settings for a load, confirm the gain, and serve them."""

import sys
from collections.abc import Sequence

from loadgen.program import Program
from tuner.commands import check, confirm, dashboard, export, fit, noise, plan, report, run, serve, storage, worker
from tuner.commands.simulation import simulate
from tuner.study.shared_storage.token import TOKEN_VARIABLE

EXIT_CODES = """exit codes:
  0         done; a study also with "no gain over the defaults is shown"
  1         no configuration meets every limit; fit: none fits
  2         usage, or a file that is missing or wrong
  3         not decided; predictions: the step costs are too inaccurate
  4         could not measure: invalid runs, the load generator failed, disk full
  130, 143  interrupted, terminated (the same command continues a study)"""

COMMANDS = {
    "check": check.COMMAND,
    "noise": noise.COMMAND,
    "run": run.COMMAND,
    "worker": worker.COMMAND,
    "storage": storage.COMMAND,
    "confirm": confirm.COMMAND,
    "report": report.COMMAND,
    "dashboard": dashboard.COMMAND,
    "export": export.COMMAND,
    "serve": serve.COMMAND,
    "simulate": simulate.COMMAND,
    "plan": plan.COMMAND,
    "fit": fit.COMMAND,
}


PROGRAM = Program(
    "tgi-tune",
    "Find launcher settings for a load, confirm the gain, and serve them.",
    EXIT_CODES,
    COMMANDS,
    secrets=(TOKEN_VARIABLE,),
)


def main(argv: Sequence[str] | None = None) -> int:
    return PROGRAM.main(argv)


if __name__ == "__main__":
    sys.exit(main())
