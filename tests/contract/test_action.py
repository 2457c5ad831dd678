"""The packaged GitHub Action: its file is complete, its page names each input, and its shell steps run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from loadgen import cli
from loadgen.commands import compare

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
DEFAULTS = {name: each["default"] for name, each in ACTION["inputs"].items()}
EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")


@pytest.fixture
def run_step(tmp_path):
    """Run the shell of a step with inputs, as a runner does; returns exit code, outputs and the words of programs.

    programs: shell scripts that stand in for programs on the PATH.
    """

    def run(name, programs, **inputs):
        step, places = STEPS[name], tmp_path / "bin"
        places.mkdir(exist_ok=True)
        for program, script in programs.items():
            (places / program).write_text(f"#!/bin/sh\n{script}\n")
            (places / program).chmod(0o755)
        values = DEFAULTS | {"a": "git:main"} | inputs
        variables = {
            key: EXPRESSION.sub(lambda each: values[each[1].removeprefix("inputs.")], text)
            for key, text in step["env"].items()
        }
        output = tmp_path / "output"
        output.write_text("")
        path = f"{places}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(tmp_path), "GITHUB_OUTPUT": str(output), **variables}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        return done, outputs

    return run


def test_the_file_declares_all_that_its_steps_use():
    text = (ROOT / "action.yml").read_text()
    used = set(re.findall(r"inputs\.([a-z-]+)", text))

    assert used == set(ACTION["inputs"])
    assert all(each["description"] for each in (*ACTION["inputs"].values(), *ACTION["outputs"].values()))
    assert all("shell" in step for step in STEPS.values() if "run" in step)
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in STEPS.values() if "uses" in step)


def test_no_script_contains_an_expression_so_that_text_of_a_pull_request_is_no_code():
    assert [name for name, step in STEPS.items() if "${{" in step.get("run", "")] == []


def test_the_page_has_a_row_for_each_input_and_output():
    page = (ROOT / "docs" / "ci" / "README.md").read_text()

    assert [name for name in (*ACTION["inputs"], *ACTION["outputs"]) if f"| `{name}` |" not in page] == []


def test_install_takes_one_requirement(run_step, tmp_path):
    done, _ = run_step("Install", {"python": 'printf "%s\\n" "$@" > words'}, install="tgi-bench[server] @ ./wheel")

    assert done.returncode == 0
    assert (tmp_path / "words").read_text().splitlines()[-1] == "tgi-bench[server] @ ./wheel"


def test_compare_is_a_command_that_is_taken(run_step, tmp_path):
    script = 'shift; printf "%s\\n" "$@" > words; mkdir gate; echo \'{"verdict": "pass"}\' > gate/comparison.json'

    done, outputs = run_step(
        "Compare",
        {"tgi-bench": script},
        config=str(ROOT / "docs/ci/gate.toml"),
        args="--label-b 'this change' --pairs 6",
    )

    assert done.returncode == 0, done.stderr
    args = cli.PROGRAM.parse(["compare", *(tmp_path / "words").read_text().splitlines()])
    assert [(side.kind, side.name) for side in compare.sides_of(args)] == [("git", "main"), ("git", "HEAD")]
    assert args.label_b == "this change"
    assert (args.pairs, args.inconclusive, str(args.out), str(args.junit)) == (6, "pass", "gate", "gate.xml")
    assert outputs == {"exit-code": "0", "verdict": "pass", "report": "gate/report.html"}


@pytest.mark.parametrize(("code", "verdict"), [(1, "regression"), (4, "not_measured")])
def test_a_failed_gate_ends_the_step_with_its_code_and_still_has_outputs(run_step, code, verdict):
    script = f'mkdir gate; echo \'{{"verdict": "{verdict}"}}\' > gate/comparison.json; exit {code}'

    done, outputs = run_step("Compare", {"tgi-bench": script})

    assert done.returncode == code
    assert outputs["exit-code"] == str(code)
    assert outputs["verdict"] == verdict.replace("_", " ")


def test_text_of_an_input_is_not_run(run_step, tmp_path):
    done, _ = run_step("Compare", {"tgi-bench": 'shift; printf "%s\\n" "$@" > words'}, b="$(touch owned); touch owned")

    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "owned").exists()
    assert "$(touch owned); touch owned" in (tmp_path / "words").read_text().splitlines()


@pytest.mark.slow
def test_the_step_plans_a_comparison_with_the_installed_program(run_step, tmp_path):
    (tmp_path / "server.toml").write_text('model_id = "preset:tiny-llama"\n')

    done, outputs = run_step(
        "Compare", {}, a="server.toml", b="server.toml", args=shlex.join(["--dry-run", "--pairs", "4"])
    )

    assert done.returncode == 0, done.stderr
    assert "preset:tiny-llama" in done.stdout or "server.toml" in done.stdout
    assert outputs == {"exit-code": "0", "verdict": "", "report": "gate/report.html"}
