"""The documents agree with the code: generated pages are current; files, classes and commands that they name exist."""

import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen import cli as bench
from loadgen.config.bench_config import BenchConfig
from loadgen.config.load_examples import EXAMPLES
from tuner import cli as tune

ROOT = Path(__file__).parents[2]
TREE = runpy.run_path(str(ROOT / "docs" / "tree.py"))
DOCS = runpy.run_path(str(ROOT / "docs" / "pages.py"))
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
).stdout.splitlines()
PAGES = sorted(name for name in FILES if name.endswith(".md") and name != "CHANGELOG.md")
PROGRAMS = {program.name: program for program in (bench.PROGRAM, tune.PROGRAM)}
NAMES_ELSEWHERE = {
    "report.md",
    *("utils.py", "helpers.py", "common.py", "misc.py", "base.py", "types.py", "constants.py"),
}
"""Files that a command writes, and names that the architecture page forbids."""
OUTSIDE = re.compile(
    r"\bspec/|\b(http-api|model-server|tuning-and-regression|performance-(cpu|gpu)|reliability|scheduling|simulation)\.md"
)


def test_the_tree_of_the_architecture_page_is_the_tree_of_the_repository():
    page = TREE["PAGE"].read_text()

    assert TREE["replace_tree"](page, TREE["render_tree"]()) == page, "run `make docs`"


GENERATED = [page for page in DOCS["MODULES"] if page != "support.md"]
"""Without the page of the model server: tests/reference_server/model_server/test_support_page.py."""


@pytest.mark.parametrize("page", GENERATED)
def test_a_generated_page_equals_the_output_of_make_docs(page: str):
    assert _text(f"docs/{page}") == DOCS["render"](page), "run `make docs`"


def test_every_setting_of_a_load_has_an_example():
    settings = [name for examples in EXAMPLES.values() for name in examples]

    assert sorted(settings) == sorted(BenchConfig.model_fields), "complete loadgen/config/load_examples.py"


@pytest.mark.parametrize("page", PAGES)
def test_python_files_and_pages_that_a_document_names_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?<![\w*{}<>/-])((?:[\w.-]+/)*[\w-]+\.(?:py|md))\b", text)) - NAMES_ELSEWHERE

    assert {name for name in named if not _exists(name, page)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())

    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_a_document_runs_exist(page):
    modules = set(re.findall(r"python3? -m ((?:benchmarks|reference_server|loadgen|tuner|tests)[\w.]*)", _text(page)))

    assert {name for name in modules if not _is_module(name)} == set()


@pytest.mark.parametrize("page", ["README.md", "docs/cookbook.md", "docs/tgi-questions.md"])
def test_commands_of_a_document_are_accepted(page):
    commands = [shlex.split(line, comments=True) for line in _shell_lines(page)]
    found = [words for words in commands if words and words[0] in PROGRAMS]

    assert found
    for name, *words in found:
        assert PROGRAMS[name].parse(words).command == words[0]


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_a_document_names_exist(page):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", _text(page))

    assert [(file, name) for file, name in named if not re.search(rf"def {name}\(", _text(file))] == []


def test_classes_that_the_architecture_page_names_exist():
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", _text("docs/architecture.md")))

    assert named - _defined_names() - LIBRARY_NAMES == set()


def test_every_promise_of_the_security_page_names_a_test_that_exists():
    page = _text("SECURITY.md")
    sources = [name for name in FILES if name.startswith("tests/") and name.endswith(".py")]
    tests = {name for source in sources for name in re.findall(r"def (test_\w+)", _text(source))}
    named = re.findall(r"`(test_\w+)(…?)`", page)

    absent = [
        name + dots
        for name, dots in named
        if not any(test.startswith(name) if dots else test == name for test in tests)
    ]
    assert absent == []
    promises = page[page.index("## Promises") : page.index("## Trust")].split("\n* ")[1:]
    assert [promise for promise in promises if "`test_" not in promise] == []
    rows = [line for line in page[page.index("## Trust") : page.index("## Out")].splitlines() if line.startswith("|")]
    assert [row for row in rows[2:] if "`test_" not in row] == []


LIBRARY_NAMES = {"AutoTokenizer", "AttentionInterface", "DataFrame"}


def test_nothing_cites_a_document_outside_the_repository():
    sources = [name for name in FILES if Path(name).suffix in {".py", ".md", ".toml", ".cpp", ".h"}]
    cited = {name for name in sources if name != _own_name() and OUTSIDE.search(_text(name))}

    assert cited == set()


@pytest.mark.parametrize("file", [name for name in FILES if re.fullmatch(r"benchmarks/results/[^/]+\.json", name)])
def test_a_stored_result_names_no_path_of_a_machine(file: str):
    words = {word for text in _strings(json.loads(_text(file))) for word in re.split(r"[\s=:,'\"]+", text)}

    assert {word for word in words if re.match(r"/\w", word)} == set()


def _strings(value: Any) -> Iterator[str]:
    """Every string value of a JSON document."""
    match value:
        case str():
            yield value
        case dict() | list():
            for each in value.values() if isinstance(value, dict) else value:
                yield from _strings(each)


def _own_name() -> str:
    return str(Path(__file__).relative_to(ROOT))


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _exists(name: str, page: str) -> bool:
    if "/" not in name:
        return any(file.endswith(f"/{name}") or file == name for file in FILES)
    return name in FILES or (ROOT / page).parent.joinpath(name).exists() or any(f.endswith(f"/{name}") for f in FILES)


def _shell_lines(page: str) -> list[str]:
    """The lines of the page's shell blocks; a line that ends with a backslash continues."""
    blocks = re.findall(r"^```sh\n(.*?)^```", _text(page), re.MULTILINE | re.DOTALL)
    return "".join(blocks).replace("\\\n", " ").splitlines()


def _is_module(name: str) -> bool:
    path = name.replace(".", "/")
    return f"{path}.py" in FILES or f"{path}/__main__.py" in FILES


def _defined_names() -> set[str]:
    sources = [name for name in FILES if name.endswith(".py") and not name.startswith("tests/")]
    definition = re.compile(r"^ *(?:class|def|async def) (\w+)", re.MULTILINE)
    return {found for name in sources for found in definition.findall(_text(name))}
