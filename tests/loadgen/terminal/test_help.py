import re
import shlex

import pytest

from loadgen import cli as bench
from loadgen.config.bench_config import BenchConfig
from loadgen.config.load_examples import EXAMPLES
from loadgen.config.load_flags import COMMON
from tuner import cli as tune

PROGRAMS = (bench.PROGRAM, tune.PROGRAM)
COMMANDS = [(program, name) for program in PROGRAMS for name in program.commands]
NAMES = [f"{program.name} {name}" for program, name in COMMANDS]


def shown(program, words, capsys):
    with pytest.raises(SystemExit) as left:
        program.parse(words)
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("program", "name"), COMMANDS, ids=NAMES)
def test_pages_2_every_command_has_its_version_and_a_help_of_80_columns(program, name, capsys):
    assert re.fullmatch(rf"{program.name} \S+\n", shown(program, [name, "--version"], capsys))
    text = shown(program, [name, "--help"], capsys)

    # A word cannot be broken.
    too_long = [line for line in text.splitlines() if len(line) > 80 and max(map(len, line.split())) < 70]
    assert [line for line in too_long if not line.startswith("usage")] == []
    assert [line for line in text.splitlines() if re.search(r"\w-$", line)] == []
    assert "exit codes:" in text


def test_pages_2_a_long_example_continues_on_the_next_line_as_a_shell_reads_it(capsys):
    text = shown(bench.PROGRAM, ["run", "--help"], capsys)

    examples = text.partition("examples:\n")[2].partition("\n\n")[0].replace("\\\n", "").splitlines()
    given = [f"tgi-bench run {example}" for example in bench.PROGRAM.commands["run"].examples]
    assert [shlex.split(line) for line in examples] == [shlex.split(line) for line in given]


@pytest.mark.parametrize(("program", "name"), COMMANDS, ids=NAMES)
def test_pages_2_the_notes_of_the_whole_help_fit_80_columns(program, name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    text = shown(program, [name, "--help-all"], capsys)

    assert [line for line in text.splitlines() if len(line) > 80 and len(line.split()) > 3] == []


def test_pages_2_choices_are_written_like_the_types_of_settings(capsys):
    assert "--order random|ascending" in shown(bench.PROGRAM, ["sweep", "--help-all"], capsys)
    assert "[FLAGS] bash|zsh|fish" in shown(bench.PROGRAM, ["completion", "--help"], capsys)


def test_pages_2_quoted_words_and_names_with_hyphens_are_not_broken(capsys):
    text = shown(bench.PROGRAM, ["run", "--help"], capsys)

    assert '"ttft_p95_ms < 500"' in text
    assert "--converge-requests" in text
    assert "openai-completions" in text


@pytest.mark.parametrize(("program", "name"), COMMANDS, ids=NAMES)
def test_pages_2_every_command_has_three_examples_that_it_accepts(program, name):
    examples = program.commands[name].examples

    assert len(examples) == 3
    for example in examples:
        assert program.parse([name, *shlex.split(example)]).command == name


def test_pages_2_help_groups_the_flags_of_a_run(capsys):
    text = shown(bench.PROGRAM, ["run", "--help"], capsys)

    titles = re.findall(r"^([A-Z][\w ,]+):$", text, re.MULTILINE)
    assert titles == [
        "Target",
        "Load",
        "Duration and stop rules",
        "Workload",
        "Objectives and price",
        "This machine",
        "Output",
        "General",
    ]
    assert "--concurrency N" in text
    assert "--duration TIME" in text
    assert "Default 8." in text


def test_pages_2_help_all_has_every_setting_with_its_variable(capsys):
    short, whole = (shown(bench.PROGRAM, ["run", flag], capsys) for flag in ("--help", "--help-all"))

    for name in BenchConfig.model_fields:
        assert f"[TGI_BENCH_{name.upper()}]" in re.sub(r"\s+", "", whole).replace("Repeatable", "")
        assert (f"--{name.replace('_', '-')} " in short) == (name in COMMON) or name == "stream"
    assert "TGI_BENCH_" not in short.replace("TGI_BENCH_JOIN_KEY", "")


def test_every_setting_of_a_load_is_in_one_section():
    names = [name for examples in EXAMPLES.values() for name in examples]

    assert sorted(names) == sorted(BenchConfig.model_fields)
    assert set(names) >= COMMON


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--concurency", "3"], "unknown flag --concurency; did you mean '--concurrency'?"),
        (["rnu"], "did you mean 'run'?"),
        (["run", "--web-port", "8123"], "unknown flag --web-port; did you mean '--web'?"),
        (["sweep", "--points", "1,2", "--order", "ascendig"], "did you mean 'ascending'?"),
        (["run", "--stream", "false"], "unexpected argument 'false'"),
        (["run", "--stream=false"], "argument --stream/--no-stream: ignored explicit argument 'false'"),
    ],
)
def test_pages_2_a_wrong_word_is_refused_with_the_nearest(words, message, capsys):
    with pytest.raises(SystemExit) as left:
        bench.PROGRAM.parse(words)

    assert left.value.code == 2
    assert message in capsys.readouterr().err
