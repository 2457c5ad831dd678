"""A git revision as a side: its worktree and its environment are created and removed."""

import subprocess
import textwrap

import pytest

from loadgen.errors import MeasurementError, UsageError
from loadgen.target.launched.revision import Revision, build, dependencies, read_at, remove_check_out

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "told-product"
version = "1"
dependencies = [{dependencies}]

[project.scripts]
{script} = "told_product:main"

[tool.setuptools]
py-modules = ["told_product"]
"""


def git(directory, *words):
    done = subprocess.run(["git", "-C", str(directory), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(directory, says, script="text-generation-launcher", dependencies=""):
    (directory / "pyproject.toml").write_text(PROJECT.format(script=script, dependencies=dependencies))
    (directory / "told_product.py").write_text(
        textwrap.dedent(f"""
            import numpy

            def main():
                print("{says}", numpy.__name__)
        """)
    )
    git(directory, "add", ".")
    git(directory, "commit", "-q", "-m", says)
    return git(directory, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path):
    """A product of one module, at two commits."""
    directory = tmp_path / "product"
    directory.mkdir()
    git(directory, "init", "-q")
    git(directory, "config", "user.email", "a@b")
    git(directory, "config", "user.name", "a")
    commit(directory, "old")
    commit(directory, "new")
    return directory


@pytest.mark.slow
def test_a_revision_with_the_same_dependencies_reuses_the_packages_and_leaves_nothing(
    repository, tmp_path, monkeypatch
):
    monkeypatch.chdir(repository)  # where `import told_product` would find the new one
    revision = Revision.find("HEAD~1", repository)

    with build(revision, tmp_path / "built") as built:
        said = subprocess.run(built.launcher, capture_output=True, text=True).stdout
        worktrees = git(repository, "worktree", "list")

    assert built.is_reused
    assert said == "old numpy\n"
    assert len(worktrees.splitlines()) == 2
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not (tmp_path / "built").exists()


@pytest.mark.slow
def test_a_kept_build_is_found_by_the_next_command_and_an_unfinished_one_is_made_again(repository, tmp_path):
    revision, directory = Revision.find("HEAD", repository), tmp_path / "built"
    with build(revision, directory, is_kept=True) as built:
        made = (directory / "installed").stat().st_mtime_ns
    with build(revision, directory, is_kept=True) as again:
        assert (directory / "installed").stat().st_mtime_ns == made
        assert again.launcher == built.launcher

    (directory / "installed").unlink()
    (directory / "environment" / "bin" / "text-generation-launcher").unlink()
    with build(revision, directory, is_kept=True) as made_again:
        said = subprocess.run(made_again.launcher, capture_output=True, text=True).stdout

    assert said == "new numpy\n"
    remove_check_out(revision, directory)
    assert not directory.exists()


def test_different_dependencies_or_versions_get_their_own_environment(repository):
    before = dependencies(repository)
    commit(repository, "more", dependencies='"numpy"')
    more = dependencies(repository)
    (repository / "constraints.txt").write_text("numpy==2\n")

    assert before != more
    assert dependencies(repository) != more


@pytest.mark.slow
def test_a_revision_without_a_launcher_is_a_usage_error_and_leaves_nothing(repository, tmp_path):
    commit(repository, "other", script="something-else")

    with pytest.raises(UsageError, match="has no text-generation-launcher"):
        build(Revision.find("HEAD", repository), tmp_path / "built").__enter__()
    assert not (tmp_path / "built").exists()


@pytest.mark.slow
def test_a_revision_that_cannot_be_installed_is_a_measurement_error_with_the_output(repository, tmp_path):
    broken = (repository / "pyproject.toml").read_text().replace("setuptools.build_meta", "nowhere")
    (repository / "pyproject.toml").write_text(broken)
    git(repository, "commit", "-q", "-a", "-m", "broken")

    with pytest.raises(MeasurementError, match="could not install the revision"):
        build(Revision.find("HEAD", repository), tmp_path / "built").__enter__()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize("name", ["nothing", "--help", "HEAD~9"])
def test_an_unknown_revision_is_a_usage_error(repository, name):
    with pytest.raises(UsageError, match="no such revision"):
        Revision.find(name, repository)


def test_outside_a_repository_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="is not in a git repository"):
        Revision.find("HEAD", tmp_path)


def test_a_file_missing_in_a_revision_is_a_usage_error(repository):
    revision = Revision.find("HEAD", repository)

    assert b"told-product" in read_at(revision, "pyproject.toml")
    with pytest.raises(UsageError, match=r"absent\.toml: no such file"):
        read_at(revision, "absent.toml")
