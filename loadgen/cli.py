"""`tgi-bench`: its commands. Each has its flags and its `run` in a module of `loadgen.commands`."""

import contextlib
import sys
from collections.abc import Sequence

from loadgen.config.distribution import JOIN_KEY_VARIABLE
from loadgen.program import Program, command_in

EXIT_CODES = """exit codes:
  0         done, or pass
  1         the check failed: a regression, or an objective missed
  2         wrong usage, or a file that is missing or wrong
  3         inconclusive
  4         could not measure: invalid run, start failed, disk full
  130, 143  interrupted, terminated; the requests measured so far are stored and reported"""

COMMANDS = {
    "run": command_in(
        "loadgen.commands.run",
        "Measure one server under one load.",
        "--url http://127.0.0.1:8080 --concurrency 16 --duration 60s",
        '--url http://127.0.0.1:8080 --mode poisson --rate 4 --slo "ttft_p95_ms < 500"',
        "--server 'vllm serve models/llama --port {port}' --profile chat --concurrency 32",
    ),
    "compare": command_in(
        "loadgen.commands.compare",
        "Judge whether B is slower than A, in interleaved pairs.",
        "git:main git:HEAD --concurrency 8 --duration 15s --junit gate.xml",
        "a.toml b.toml --pairs 6 --gate ttft_p95_ms",
        "http://10.0.0.1:8080 http://10.0.0.2:8080 --no-relaunch --concurrency 16",
    ),
    "noise": command_in(
        "loadgen.commands.noise",
        "Measure how much runs of one side differ and which change pairs of runs can detect.",
        "git:HEAD --runs 6 --duration 15s",
        "server.toml --concurrency 8 --gate ttft_p95_ms",
        "http://127.0.0.1:8080 --no-relaunch --runs 4",
    ),
    "bisect": command_in(
        "loadgen.commands.bisect",
        "Find the revision that changed a metric.",
        "v1.0 HEAD --metric output_tokens_per_s --concurrency 8",
        "main~20 main --metric ttft_p95_ms --duration 20s --out runs/bisect",
        "good bad --metric tpot_mean_ms --max-runs 30",
    ),
    "baseline": command_in(
        "loadgen.commands.baseline",
        "Store runs under a name; show and list what is stored.",
        "bless main runs/a runs/b --reason 'release 1.2'",
        "show main",
        "list --json",
    ),
    "history": command_in(
        "loadgen.commands.history",
        "Store results per commit; find the commits that changed them.",
        "add runs/quickstart",
        "check --metric ttft_p95_ms",
        "check --fail --out runs/history",
    ),
    "report": command_in(
        "loadgen.commands.report",
        "Report on stored runs or a comparison; or the index of a folder.",
        "runs/quickstart",
        "runs/monday runs/friday --out runs/both",
        "runs/quickstart --json",
    ),
    "import": command_in(
        "loadgen.commands.import_runs",
        "Read results of vllm bench serve, guidellm and aiperf.",
        "result.json",
        "guidellm.json --out runs/theirs",
        "aiperf.json --json",
    ),
    "sweep": command_in(
        "loadgen.commands.sweep",
        "Measure several loads on one server.",
        "--url http://127.0.0.1:8080 --points 1..64 --duration 20s",
        '--url http://127.0.0.1:8080 --points 1..64 --slo "ttft_p95_ms < 500"',
        "--url http://127.0.0.1:8080 --mode poisson --points 1,2,4,8 --duration 60s",
    ),
    "search": command_in(
        "loadgen.commands.search",
        "Find the highest load that meets the objectives.",
        '--url http://127.0.0.1:8080 --low 1 --high 64 --slo "ttft_p95_ms < 500"',
        '--url http://127.0.0.1:8080 --mode poisson --low 1 --high 50 --slo "e2e_p95_ms < 5000"',
        '--low 1 --high 32 --duration 20s --slo "tpot_mean_ms < 50" --tolerance 10',
    ),
    "selftest": command_in(
        "loadgen.commands.selftest",
        "Measure the accuracy and capacity of this machine's client.",
        "",
        "--streams 8,64",
        "--seconds 10 --json",
    ),
}
PROGRAM = Program(
    "tgi-bench",
    "Benchmark TGI- and OpenAI-compatible servers.",
    EXIT_CODES,
    COMMANDS,
    secrets=(JOIN_KEY_VARIABLE,),
)


def main(argv: Sequence[str] | None = None) -> int:
    return PROGRAM.main(argv)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
