"""Writes the tree of docs/architecture.md from the files and their docstrings: `python docs/tree.py`."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("reference_server", "loadgen", "tuner", "reports", "benchmarks")
BEGIN, END = "<!-- tree: written by docs/tree.py -->\n", "<!-- end of tree -->\n"
WIDTH = 120


def render_tree(root: Path = ROOT) -> str:
    """One block per folder; one line per module with the first sentence of its docstring."""
    lines = [line for package in PACKAGES for line in _folder(root / package, root)]
    return "\n".join(("```", *lines[1:], "```\n"))


def _folder(folder: Path, root: Path) -> Iterator[str]:
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    if modules:
        yield ""
        yield f"{folder.relative_to(root)}/"
    width = max((len(path.name) for path in modules), default=0) + 4
    for path in modules:
        text = f"  {path.name:<{width - 2}}{first_sentence(path)}"
        yield from textwrap.wrap(text, WIDTH, subsequent_indent=" " * width, drop_whitespace=True) or [text]
    for child in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield from _folder(child, root)


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line, without its full stop."""
    source = path.read_text(encoding="utf-8")
    docstring = source.split('"""', 2)[1] if source.startswith('"""') else ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<!e\.g)(?<!i\.e)\.(?:\s|$)", paragraph)[0]


def replace_tree(page: str, tree: str) -> str:
    """The page with the text between its two markers replaced."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + tree + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(replace_tree(PAGE.read_text(encoding="utf-8"), render_tree()), encoding="utf-8")
