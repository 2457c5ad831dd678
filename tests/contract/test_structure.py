"""The packages as a graph: no module imports itself through others, and a class name means one thing.

Imports inside functions and under `TYPE_CHECKING` count too. `make check` runs this file.
"""

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("reference_server", "loadgen", "reports", "tuner", "benchmarks")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each module; parsed in a fixture, because every test process imports this file."""
    return {module: ast.parse(path.read_text()) for module, path in FILES.items()}


def imports_of(tree: ast.AST) -> set[str]:
    """Modules of these packages that are imported anywhere in a module."""
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= submodules & FILES.keys() if submodules <= FILES.keys() else {node.module, *submodules}
    return named & FILES.keys()


def cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that all reach each other."""
    reachable = {module: {module} for module in imports}
    changed = True
    while changed:
        changed = False
        for module, targets in imports.items():
            found = reachable[module].union(*(reachable[target] for target in targets))
            changed |= len(found) > len(reachable[module])
            reachable[module] = found
    groups = {frozenset(other for other in reachable[module] if module in reachable[other]) for module in imports}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def test_no_module_imports_itself_through_others(trees: dict[str, ast.Module]) -> None:
    assert cycles({module: imports_of(tree) for module, tree in trees.items()}) == []


def test_a_cycle_of_three_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_a_public_class_name_occurs_once(trees: dict[str, ast.Module]) -> None:
    places = defaultdict(list)
    for module, tree in trees.items():
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)

    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
