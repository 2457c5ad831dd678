"""The reference pages under docs/ are complete, and their examples are valid."""

import shlex
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from loadgen.cli import PROGRAM
from loadgen.commands.shared_flags import load_config
from loadgen.config.bench_config import BenchConfig
from loadgen.config.key_table import key_of
from loadgen.config.load_examples import EXAMPLES
from reports.metrics.named_metrics import METRICS
from reports.metrics.server.server_metrics import SERVER_METRICS
from tuner.commands import plan, plan_page
from tuner.config import TuneConfig
from tuner.servers.select import server_of
from tuner.space import space_page
from tuner.space.search_space import SearchSpace

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = [*dict(space_page.SECTIONS).values(), *dict(plan_page.SECTIONS).values()]


@pytest.mark.parametrize(("name", "example"), [each for examples in EXAMPLES.values() for each in examples.items()])
def test_the_example_of_a_setting_is_a_valid_load_that_sets_it(name: str, example: str):
    args = PROGRAM.parse(["run", *shlex.split(example)])

    config = load_config(args)

    assert getattr(args, name) is not None
    assert getattr(config, name) != BenchConfig.model_fields[name].default


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_of_a_space_or_plan_file_has_a_meaning(section: type[BaseModel]):
    names = section.model_fields

    assert [key_of(section, name) for name in names if not names[name].description] == []


def test_the_example_of_a_space_file_is_a_space_that_can_be_searched():
    config = TuneConfig.model_validate(tomllib.loads(space_page.EXAMPLE))

    space = SearchSpace.of(config.param, config.forbid, server_of(config.server).known)

    assert len(space.parameters) == 4
    assert BenchConfig.model_validate(config.load).concurrency == 16


def test_the_example_of_a_plan_file_is_a_plan():
    section = plan.PlanFile.model_validate(tomllib.loads(plan_page.EXAMPLE)).plan

    rates, pairs = section.to_size
    assert len(rates) == 3 + 24
    assert (80, "least_loaded") in pairs


def test_every_metric_is_on_its_page():
    page = (DOCS / "metrics.md").read_text()

    assert [each.name for each in (*METRICS, *SERVER_METRICS) if f"| `{each.name}` |" not in page] == []
