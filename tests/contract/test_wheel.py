import email
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built with the build tools that are installed."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    # A clean tree: a stale build/ in the checkout would find its way into the wheel.
    files = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
    ).stdout
    for name in files.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory, source],
        check=True,
        capture_output=True,
    )
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as archive:
        yield archive.namelist(), archive.read


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel):
    names, _ = wheel

    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "reference_server",
        "loadgen",
        "reports",
        "tuner",
    }


@pytest.mark.parametrize(
    "data",
    [
        "reference_server/transport/generate.binpb",
        "reference_server/model_server/cpu_kernels/linear.cpp",
        "reference_server/model_server/cpu_kernels/kernels.h",
        "reference_server/model_server/cpu_kernels/rows.h",
        "reference_server/presets/tiny-llama/config.json",
        "reference_server/presets/tiny-llama/model.safetensors",
        "reference_server/presets/tokenizer/tokenizer.json",
        "reports/renderers/report.html.j2",
        "reports/renderers/report.css",
        "reports/renderers/copy.js",
    ],
)
def test_the_data_that_the_packages_need_is_in_the_wheel(wheel, data):
    names, _ = wheel

    assert data in names


def test_the_wheels_files_are_code_and_data_of_known_kinds(wheel):
    names, _ = wheel

    outside = [name for name in names if ".dist-info/" not in name]
    kinds = {Path(name).suffix for name in outside}
    assert kinds <= {
        *(".py", ".typed", ".c", ".cpp", ".h", ".binpb", ".json", ".safetensors", ".txt", ".toml"),
        *(".html", ".css", ".js", ".j2"),
    }
    parts = {part for name in names for part in Path(name).parts}
    assert [part for part in parts if part.startswith((".", "test")) or part in ("__pycache__", "build")] == []


def test_the_wheels_metadata_is_the_projects(wheel):
    names, read = wheel
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = f"tgi_bench-{project['version']}.dist-info"

    metadata = email.message_from_string(read(f"{folder}/METADATA").decode())

    assert (metadata["Name"], metadata["Version"]) == ("tgi-bench", project["version"])
    assert (metadata["License-Expression"], metadata.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    assert read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["Requires-Python"] == project["requires-python"]
    assert metadata.get_all("Classifier") == project["classifiers"]
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    assert {each.name for each in required if each.marker is None} == {
        Requirement(line).name for line in project["dependencies"]
    }
    assert [each.name for each in required if each.url] == []
    assert metadata["Summary"] == project["description"]
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert {name.partition("/")[2] for name in names if name.startswith(folder)} == {
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"),
    }


def test_the_wheel_has_the_six_commands(wheel):
    names, read = wheel

    entry_points = read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert {line.split(" = ")[0] for line in entry_points.splitlines() if " = " in line} == {
        "tgi-bench",
        "tgi-tune",
        "text-generation-launcher",
        "text-generation-router",
        "text-generation-server",
        "text-generation-benchmark",
    }
