import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen import cli
from loadgen.terminal.completion import candidates
from tuner import cli as tune_cli

BIN = Path(sys.executable).parent
PROGRAMS = ("tgi-bench", "tgi-tune")
# A value after `=`, a word below a command, a file.
LINES = {
    "tgi-bench run --mode=poi": "tgi-bench run --mode=poisson",
    "tgi-tune simulate val": "tgi-tune simulate validate",
    "tgi-bench report run_of_to": "tgi-bench report run_of_today",
}


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
        (["completion", ""], ["bash", "zsh", "fish"]),
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on the PATH")
def test_pages_2_zsh_completes_after_the_documented_line(tmp_path):
    (tmp_path / "run_of_today").write_text("")
    # The tab completes a line; then `print` is typed at its start, so that the shell prints it.
    keys = "".join(
        ["PS1=\n", *(f'eval "$({program} completion zsh)"\n' for program in PROGRAMS)]
        + [f'{typed}\t\x01print -r -- "\x05"\n' for typed in LINES]
        + ["exit\n"]
    )

    written = in_terminal(["zsh", "-f", "-i"], keys, tmp_path)

    assert set(LINES.values()) <= {line.strip() for line in written.splitlines()}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish on the PATH")
def test_pages_2_fish_completes_after_the_documented_line(tmp_path):
    (tmp_path / "run_of_today").write_text("")
    script = "; ".join(
        [f"{program} completion fish | source" for program in PROGRAMS] + [f"complete -C '{typed}'" for typed in LINES]
    )

    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
        timeout=120,
    )

    candidates = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert candidates == [completed.split()[-1] for completed in LINES.values()], done.stderr


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(home), "TERM": "xterm"}


def in_terminal(command: list[str], keys: str, directory: Path) -> str:
    """The output of a program in a terminal of its own, after these keys."""
    terminal, its_end = pty.openpty()
    with subprocess.Popen(
        command, stdin=its_end, stdout=its_end, stderr=its_end, cwd=directory, env=environment(directory)
    ) as shell:
        os.close(its_end)
        os.write(terminal, keys.encode())
        written = b""
        try:
            while block := os.read(terminal, 65536):
                written += block
        except OSError:  # the shell has ended
            pass
        shell.wait(60)
    os.close(terminal)
    return written.decode(errors="replace")
