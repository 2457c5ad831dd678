"""`tgi-bench`: its commands. Each has its flags and its `run` in a module of `loadgen.commands`."""

import contextlib
import sys
from collections.abc import Sequence

from loadgen.program import Program, command_in

EXIT_CODES = """exit codes:
  0         done, or pass
  1         the judged thing failed
  2         wrong usage, or a file that is missing or wrong
  3         inconclusive
  4         could not measure: invalid run, start failed, disk full
  130, 143  interrupted, terminated; the requests measured so far are stored and reported"""

COMMANDS = {
    "run": command_in("loadgen.commands.run", "Measure one server under one load."),
    "compare": command_in("loadgen.commands.compare", "Judge whether B is slower than A, in interleaved pairs."),
    "noise": command_in(
        "loadgen.commands.noise", "Measure how much runs of one side differ and which change pairs of runs can detect."
    ),
    "bisect": command_in("loadgen.commands.bisect", "Find the revision that changed a metric."),
    "baseline": command_in("loadgen.commands.baseline", "Store runs under a name; show and list what is stored."),
    "history": command_in("loadgen.commands.history", "Store results per commit; find the commits that changed them."),
    "report": command_in("loadgen.commands.report", "Report on stored runs or a comparison; or the index of a folder."),
    "import": command_in("loadgen.commands.import_runs", "Read results of vllm bench serve, guidellm and aiperf."),
    "sweep": command_in("loadgen.commands.sweep", "Measure several loads on one server."),
    "search": command_in("loadgen.commands.search", "Find the highest load that meets the objectives."),
    "selftest": command_in("loadgen.commands.selftest", "Measure the accuracy and capacity of this machine's client."),
}
PROGRAM = Program("tgi-bench", "Benchmark TGI- and OpenAI-compatible servers.", EXIT_CODES, COMMANDS)


def main(argv: Sequence[str] | None = None) -> int:
    return PROGRAM.main(argv)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
