"""The bill of materials that `make supply-chain` writes: each package that an installation brings, by its version."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.contract.test_licenses import dependencies

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def test_the_bill_of_materials_has_every_dependency_with_its_version_and_address(tmp_path: Path) -> None:
    path = tmp_path / "sbom.json"
    command = [Path(sys.executable).parent / "cyclonedx-py", "environment", sys.executable]
    options = ["--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "--output-file", path]
    subprocess.run([*command, *options], check=True, capture_output=True)

    bill = json.loads(path.read_text())

    root = bill["metadata"]["component"]
    assert (bill["bomFormat"], root["name"], root["licenses"][0]["license"]["id"]) == (
        *("CycloneDX", "tgi-bench"),
        "Apache-2.0",
    )
    listed = {canonicalize_name(each["name"]): each for each in bill["components"]}
    for name, package in dependencies().items():
        component = listed[canonicalize_name(name)]
        assert component["version"] == package.version
        assert component["purl"].startswith("pkg:pypi/")
    assert root["bom-ref"] in {each["ref"] for each in bill["dependencies"]}
