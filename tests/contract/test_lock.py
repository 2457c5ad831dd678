"""requirements.lock, which the images install: one version and the hashes of each package that they need, no other."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_each_package_of_the_lock_has_one_version_and_its_hashes() -> None:
    blocks = re.split(r"\n(?=[a-z])", re.sub(r"^#.*\n", "", LOCK, flags=re.MULTILINE).strip())

    assert len(blocks) > 80
    assert [block for block in blocks if not re.fullmatch(r"\S+==\S+( \\\n +--hash=sha256:[0-9a-f]{64})+", block)] == []


def test_the_lock_has_the_packages_of_the_server_and_its_grammars() -> None:
    needed = [*PROJECT["dependencies"]]
    needed += [each for extra in ("server", "grammar") for each in PROJECT["optional-dependencies"][extra]]
    locked = versions(LOCK)

    for requirement in map(Requirement, needed):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"run `make lock`: {requirement.name} is not in requirements.lock"
        assert requirement.specifier.contains(version), f"run `make lock`: {requirement}, locked is {version}"


def test_the_lock_has_the_versions_that_the_tests_run_with() -> None:
    tested = versions((ROOT / "constraints.txt").read_text())
    locked = versions(LOCK)

    assert {name: version for name, version in locked.items() if tested.get(name, version) != version} == {}
    # torch's CUDA build brings these; the tests run without them.
    own = {name for name in locked if not re.match(r"(nvidia|cuda)-|torch$|triton$", name)}
    assert own - set(tested) == set()


def versions(text: str) -> dict[str, Version]:
    return {canonicalize_name(name): Version(found) for name, found in re.findall(r"^([\w.-]+)==([\w.+]+)", text, re.M)}
