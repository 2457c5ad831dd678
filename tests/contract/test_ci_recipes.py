"""The recipes of docs/ci are commands that this version takes, and end in under 15 minutes."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from loadgen import cli
from loadgen.commands import comparison_args
from loadgen.commands.shared_flags import load_config
from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / "docs" / "ci"


def github():
    steps = yaml.safe_load((CI / "github-actions.yml").read_text())["jobs"]["gate"]["steps"]
    return [step["run"] for step in steps if "run" in step]


def gitlab():
    return yaml.safe_load((CI / "gitlab-ci.yml").read_text())["performance-gate"]["script"]


def makefile():
    text = (ROOT / "Makefile").read_text()
    rule = re.search(r"^perf-gate:.*\n\t(.*)\n", text, re.MULTILINE)
    assert rule is not None
    return [rule[1].replace("$(BIN)/", "").replace("$(BASE)", "$BASE")]


@pytest.mark.parametrize("commands", [github, gitlab, makefile])
def test_the_gate_of_a_recipe_is_a_command_that_is_taken(commands, monkeypatch):
    monkeypatch.chdir(ROOT)
    [line] = [command for command in commands() if command.startswith("tgi-bench compare")]
    words = shlex.split(line.replace("$BASE", "main"))[1:]

    args = cli.PROGRAM.parse(words)
    sides = comparison_args.sides_of(args)
    load = load_config(args)

    assert [(side.kind, side.name) for side in sides] == [("git", "main"), ("git", "HEAD")]
    assert comparison_args.options_of(args, load).min_effect == 0.05
    assert args.max_minutes <= 12
    assert (load.warmup_s, load.duration_s, args.interleave, args.min_pairs) == (0.25, 2, 8, 7)


def test_every_toml_file_of_the_recipes_is_a_load():
    for path in CI.glob("*.toml"):
        parsing.load(BenchConfig, {}, path)


def test_commands_of_the_page_are_taken(monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = re.findall(
        r"(?:^|`)tgi-bench ((?:compare|noise|baseline|history add) [^`\n]+)",
        (CI / "README.md").read_text().replace("\\\n", ""),
        re.M,
    )

    assert len(lines) >= 5
    for line in lines:
        if "A B" not in line and "history add" not in line:
            cli.PROGRAM.parse(shlex.split(line))
