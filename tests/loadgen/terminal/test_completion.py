import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen import cli
from loadgen.terminal.completion import candidates
from tuner import cli as tune_cli

BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["ba"], ["baseline"]),
        (["run", "--concu"], ["--concurrency"]),
        (["run", "--mode", "po"], ["poisson"]),
        (["run", "--mode", "=", "po"], ["poisson"]),
        (["run", "--mode", "="], ["closed", "constant", "poisson", "gamma", "burst", "stages", "sessions", "trace"]),
        (["sweep", "--order", "r"], ["random"]),
        (["run", "--no-str"], ["--no-stream"]),
        (["run", "--trace-file", ""], []),
        (["completion", ""], ["bash"]),
    ],
)
def test_the_words_that_complete_a_line(line, found):
    assert candidates(cli.PROGRAM.parser(line), line) == found


def test_flags_of_a_nested_command_are_completed():
    line = ["simulate", "validate", "--rep"]

    assert candidates(tune_cli.PROGRAM.parser(line), line) == ["--repeats"]


def test_pages_2_bash_completes_after_the_documented_line():
    script = """
    eval "$(tgi-bench completion bash)"
    COMP_WORDS=(tgi-bench run --mode poi); COMP_CWORD=3
    _tgi_bench
    echo "${COMPREPLY[@]}"
    complete -p tgi-bench
    """
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}

    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=120)

    assert done.stdout.splitlines()[0] == "poisson"
    assert "-F _tgi_bench tgi-bench" in done.stdout
