"""Figures of trials over settings: the texts over their points, and marks that do not cover each other."""

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Annotation

from reports.document import Size
from reports.plots.figure import HALF, NARROW, WIDE
from reports.plots.hovers import Hovers
from reports.plots.study.settings_plots import MAX_TEXTS, parallel_coordinates, settings_map, slice_of
from reports.study import Knob, TrialOutcome

BUDGET = Knob("budget", low=1, high=4)
CHUNKING = Knob("chunking", scale="category")


def texts_at(place: int, count: int) -> list[str]:
    """The texts over one axis of launches with different budgets and the same choice."""
    frame = pd.DataFrame(
        {
            "budget": range(count),
            "chunking": pd.Series([True] * count, dtype=object),
            "value": [10.0 * number for number in range(count)],
            "rank": [number / count for number in range(count)],
            "is_winner": [False] * count,
            "text": [f"trial {number}" for number in range(count)],
        }
    )
    [axes] = parallel_coordinates(frame, (BUDGET, CHUNKING), "speed", WIDE).axes
    hovers = [each for each in axes.artists if isinstance(each, Hovers)]
    return [text for each in hovers for x, _, text in each.points if x == place]


def test_pages_1_parallel_coordinates_name_every_launch_at_every_setting() -> None:
    assert texts_at(0, 3) == ["trial 0", "trial 1", "trial 2"]
    assert texts_at(1, 3) == ["trial 0\ntrial 1\ntrial 2"]
    assert texts_at(2, 3) == ["trial 0", "trial 1", "trial 2"]


def test_a_point_of_many_launches_names_the_first_and_counts_the_others() -> None:
    [text] = texts_at(1, MAX_TEXTS + 5)

    assert text.splitlines()[-2:] == [f"trial {MAX_TEXTS - 1}", "and 5 more"]


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_pages_1_a_map_of_two_choices_shows_every_configuration(size: Size) -> None:
    choices = list(itertools.islice(itertools.cycle(itertools.product(("on", "off"), ("f16", "q8_0"))), 32))
    frame = pd.DataFrame(choices, columns=["x", "y"], dtype=object).assign(
        outcome=TrialOutcome.FEASIBLE, number=range(32), text=[f"trial {number}" for number in range(32)]
    )

    figure = settings_map(frame, Knob("fused", scale="category"), Knob("cache", scale="category"), size)

    [axes] = figure.axes
    [hovers] = [each for each in axes.artists if isinstance(each, Hovers)]
    places = axes.transData.transform([(x, y) for x, y, _ in hovers.points])
    distances = np.hypot(*(places[:, None, :] - places[None, :, :]).transpose(2, 0, 1))[np.triu_indices(32, 1)]
    assert distances.min() > 10
    assert [(round(x), round(y)) for x, y, _ in hovers.points] == [
        (["off", "on"].index(x), ["f16", "q8_0"].index(y)) for x, y in choices
    ]
    numbers = [each.get_text() for each in axes.texts if isinstance(each, Annotation) and each.get_text().isdigit()]
    assert numbers == [str(number) for number in range(32)]


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_pages_1_a_map_of_two_numbers_shows_configurations_with_equal_numbers(size: Size) -> None:
    numbers = [(2**budget, 2**rows) for budget in (6, 7, 9) for rows in range(3)] * 3
    frame = pd.DataFrame(numbers, columns=["x", "y"], dtype=object).assign(
        outcome=TrialOutcome.FEASIBLE, number=range(27), text=[f"trial {number}" for number in range(27)]
    )

    figure = settings_map(frame, Knob("budget", scale="log"), Knob("rows", scale="log"), size)

    [axes] = figure.axes
    [hovers] = [each for each in axes.artists if isinstance(each, Hovers)]
    places = axes.transData.transform([(x, y) for x, y, _ in hovers.points])
    distances = np.hypot(*(places[:, None, :] - places[None, :, :]).transpose(2, 0, 1))[np.triu_indices(27, 1)]
    assert distances.min() > 8
    assert [y for _, y, _ in hovers.points] == pytest.approx([y for _, y in numbers])


@pytest.mark.parametrize("size", [HALF, NARROW])
@pytest.mark.parametrize(
    ("knob", "settings"),
    [(CHUNKING, ("on", "off")), (Knob("budget", scale="log"), (256, 1024, 4096)), (BUDGET, (0.5, 0.51, 3.2))],
)
def test_pages_1_marks_of_one_setting_do_not_touch(knob: Knob, settings: tuple[object, ...], size: Size) -> None:
    own = list(itertools.islice(itertools.cycle(settings), 15))
    frame = pd.DataFrame({"setting": pd.Series(own, dtype=object)}).assign(
        value=[*(1000.0 + number for number in range(14)), 1100.0],
        outcome=TrialOutcome.FEASIBLE,
        is_winner=[number == 13 for number in range(15)],
        text=[f"trial {number}" for number in range(15)],
    )

    [axes] = slice_of(frame, knob, "speed", size).axes

    [hovers] = [each for each in axes.artists if isinstance(each, Hovers)]
    assert axes.get_xlim()[0] <= min(x for x, _, _ in hovers.points)
    assert axes.get_ylim()[0] < 1000
    places = axes.transData.transform([(x, y) for x, y, _ in hovers.points])
    distances = np.hypot(*(places[:, None, :] - places[None, :, :]).transpose(2, 0, 1))[np.triu_indices(15, 1)]
    assert distances.min() > 9
    assert [y for _, y, _ in hovers.points] == pytest.approx(frame["value"].tolist())
