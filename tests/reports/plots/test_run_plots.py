"""Figures have units, the better direction and the names of runs, in both sizes."""

import re
from importlib import resources

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from reports.document import Size
from reports.pages.sections.run_figures import distribution_frame
from reports.plots import latency_plots, run_plots
from reports.plots.figure import HALF, NARROW, PALETTE

RUNS = ("one", "two")


def texts(figure: Figure) -> str:
    axes = figure.axes
    labels = [label for each in axes for label in (each.get_title("left"), each.get_xlabel(), each.get_ylabel())]
    return " | ".join([*labels, *(text.get_text() for each in axes for text in each.texts)])


def both(**columns: np.ndarray) -> pd.DataFrame:
    return pd.concat([pd.DataFrame({"run": run, **columns}) for run in RUNS], ignore_index=True)


STEPS = np.arange(1.0, 61.0)
TIMELINE = both(
    t_s=STEPS,
    bin_s=np.ones(60),
    output_tokens_per_s=100 + STEPS,
    in_flight=np.full(60, 8.0),
    ttft_p50_ms=STEPS,
    ttft_p95_ms=2 * STEPS,
    failed=(STEPS == 9).astype(int),
)
DISTRIBUTION = both(fraction=np.linspace(0, 1, 60), value_ms=STEPS)
LENGTHS = both(tokens=STEPS * 10, value_ms=STEPS)
DRIFT = both(t_s=STEPS, value_ms=STEPS)


@pytest.mark.parametrize("size", [HALF, pytest.param(NARROW, marks=pytest.mark.slow)])
def test_axes_are_named_with_units_and_direction(size: Size) -> None:
    windows = [(5.0, 55.0)] * 2

    assert "output tokens/s  ↑ better" in texts(run_plots.timeline(TIMELINE, windows, size))
    assert "TTFT, ms: line p50, dashed p95  ↓ better" in texts(run_plots.load_timeline(TIMELINE, windows, size))
    assert "TTFT, ms (log scale)   ← better" in texts(latency_plots.distribution(DISTRIBUTION, "TTFT", size))
    assert "TTFT, ms  ↓ better" in texts(latency_plots.against_length(LENGTHS, "TTFT", "prompt length", size))
    assert "prompt length, tokens" in texts(latency_plots.against_length(LENGTHS, "TTFT", "prompt length", size))
    assert "seconds since the run's start" in texts(latency_plots.over_time(DRIFT, "TTFT", windows, size))


def test_several_runs_are_labelled_and_a_single_one_is_not() -> None:
    assert all(run in texts(latency_plots.distribution(DISTRIBUTION, "TTFT", HALF)) for run in RUNS)
    single = DISTRIBUTION[DISTRIBUTION["run"] == "one"]
    assert "one" not in texts(latency_plots.distribution(single, "TTFT", HALF)).split()
    assert "p50  30.5 ms" in texts(latency_plots.distribution(single, "TTFT", HALF))


def test_values_beyond_the_axis_are_counted() -> None:
    outlier = pd.DataFrame({"run": "one", "tokens": np.arange(1000.0), "value_ms": np.append(np.ones(999), 500.0)})

    assert "1 above 1.25 ms" in texts(latency_plots.against_length(outlier, "TTFT", "prompt length", HALF))


def test_every_colour_of_the_palette_is_unique() -> None:
    assert len(set(PALETTE.values())) == len(PALETTE)


def test_labelled_percentiles_equal_those_of_the_tables() -> None:
    values = np.random.default_rng(0).lognormal(size=5_000)

    frame = distribution_frame("one", values)

    assert float(np.interp(0.95, frame["fraction"], frame["value_ms"])) == pytest.approx(
        1e3 * np.quantile(values, 0.95)
    )
    assert len(frame) < 410


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(a: str, b: str) -> float:
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1, 2], ids=["light", "dark", "print"])
def test_every_text_colour_has_a_contrast_of_4_5_to_1(theme: int) -> None:
    css = resources.files("reports.renderers").joinpath("report.css").read_text()
    variables = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css.split(":root {")[theme + 1].partition("}")[0]))

    assert set(PALETTE) <= set(variables)
    for name, colour in variables.items():
        if name not in ("paper", "soft", "shade", "grid"):
            assert _contrast(colour, variables["paper"]) >= 4.5, name
            assert _contrast(colour, variables["soft"]) >= 4.5, name


def test_the_light_page_has_the_colours_of_the_figures() -> None:
    css = resources.files("reports.renderers").joinpath("report.css").read_text()
    light = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css.split(":root {")[1].partition("}")[0]))

    assert {name: light[name] for name in PALETTE} == dict(PALETTE)


def test_the_vertical_axis_reaches_above_the_line_and_its_labels() -> None:
    for top in (1.0, 7.0, 99.0, 1_013.0, 1_600.0):
        figure = run_plots.timeline(TIMELINE.assign(output_tokens_per_s=top), [(5.0, 55.0)], HALF)
        [axes] = figure.axes

        assert axes.get_ylim()[1] >= 1.2 * top
        assert axes.get_ylim()[1] == axes.get_yticks()[-1]
