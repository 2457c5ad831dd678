"""A setting as an axis: the default and its value are one place, and switches have the words of the tables."""

import pandas as pd
import pytest

from reports.plots.figure import HALF, new_figure
from reports.plots.study.setting_axis import ends_of, places_of, setting_axis
from reports.study import Knob

QUANTIZE = Knob("quantize", default="none", scale="category")
BUDGET = Knob("max_batch_prefill_tokens", default=4096, scale="log")


def column(*values: object) -> "pd.Series[object]":
    return pd.Series(list(values), dtype=object)


def test_pages_1_an_unset_choice_is_drawn_at_its_default_and_not_beside_it() -> None:
    _, [axes] = new_figure(HALF)

    setting_axis(axes, "x", QUANTIZE, column(None, "none", "eetq"), HALF)

    assert [label.get_text() for label in axes.get_xticklabels()] == ["eetq", "none"]
    assert places_of(QUANTIZE, column(None, "none", "eetq")).tolist() == [1, 1, 0]


def test_an_unset_number_is_at_its_default_and_below_all_others_without_a_known_one() -> None:
    assert places_of(BUDGET, column(None, 512, 8192)).tolist() == [4096, 512, 8192]
    assert ends_of(BUDGET, column(None, 512, 8192)) == ("512", "8192")
    assert places_of(Knob("budget", scale="log"), column(None, 512, 8192))[0] == pytest.approx(512 / 2)


def test_ticks_of_a_setting_have_no_separators_as_its_value_in_tables() -> None:
    _, [axes] = new_figure(HALF)

    setting_axis(axes, "x", Knob("ctx_size", default=16384, scale="log"), column(None, 4096, 1048576), HALF)

    assert [label.get_text() for label in axes.get_xticklabels()] == ["4096", "16384", "1048576"]


def test_a_switch_has_the_words_of_the_tables() -> None:
    assert ends_of(Knob("prefill_chunking", scale="category"), column(True, False)) == ("false", "true")
