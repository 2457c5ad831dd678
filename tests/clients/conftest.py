"""Clients that are imported once a test needs them; a table of the outcomes of the clients' features at the end."""

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.clients.matrix import Outcome, render_page, render_table

OUTCOMES = pytest.StashKey[list[Outcome]]()
#: Where the page of docs is written to, if anywhere.
PAGE_VARIABLE = "CLIENTS_PAGE"


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    """Not at the top of a test module: its import takes half a second in each test process."""
    return pytest.importorskip("openai")


@pytest.fixture
def keep(pytestconfig: pytest.Config) -> Callable[[Outcome], None]:
    """Put an outcome into the table."""
    return pytestconfig.stash.setdefault(OUTCOMES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = config.stash.get(OUTCOMES, [])
    if not outcomes:
        return
    terminalreporter.section("clients")
    terminalreporter.write_line(render_table(outcomes))
    if page := os.environ.get(PAGE_VARIABLE):
        Path(page).write_text(render_page(outcomes))
