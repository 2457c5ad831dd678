"""Damaged bytes at the trust boundaries: 60 cases of each reader, 800 in the long suite.

A finding prints its seed and case; `python -m benchmarks.robustness.fuzz --target … --seed … --case …` replays it.
"""

import secrets
from pathlib import Path

import pytest

from benchmarks.robustness.fuzz import FuzzFindingError, fuzz
from benchmarks.robustness.targets import FuzzTarget, all_targets

FEW, MANY = 60, 800
FIXED_SEED = 20_260


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FuzzTarget]:
    return all_targets(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def cases(request: pytest.FixtureRequest) -> range:
    return range(int(request.param))


def check(targets: dict[str, FuzzTarget], prefix: str, cases: range) -> None:
    """The short suite has one seed; the long suite draws another, which a finding prints."""
    seed = FIXED_SEED if len(cases) == FEW else secrets.randbelow(2**32)
    found = [fuzz(target, seed, cases) for name, target in targets.items() if name.startswith(prefix)]
    assert found
    assert all(each.refused for each in found)


def test_fuzz_frames_of_the_model_server(targets: dict[str, FuzzTarget], cases: range):
    check(targets, "frame_", cases)


def test_fuzz_run_directories(targets: dict[str, FuzzTarget], cases: range):
    check(targets, "run_directory_", cases)


def test_fuzz_toml_files(targets: dict[str, FuzzTarget], cases: range):
    check(targets, "toml_", cases)


def test_fuzz_traces_and_prompts(targets: dict[str, FuzzTarget], cases: range):
    check(targets, "trace_", cases)


@pytest.mark.parametrize("name", ["json_body", "study_result", "checkpoint"])
def test_fuzz_documents(targets: dict[str, FuzzTarget], cases: range, name: str):
    check(targets, name, cases)


def test_every_whole_example_is_read(targets: dict[str, FuzzTarget], tmp_path: Path):
    for name, target in targets.items():
        folder = tmp_path / name
        folder.mkdir()
        for example in target.examples:
            target.read(example, folder)


def test_a_finding_names_the_command_that_replays_it():
    def divides(data: bytes, _folder: Path) -> float:
        return 1 / (len(data) % 2)

    target = FuzzTarget("odd", (b"abcd",), divides, ())

    with pytest.raises(FuzzFindingError, match="replay with --target odd --seed 5 --case"):
        fuzz(target, 5, range(50))
