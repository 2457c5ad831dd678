"""Figures of a comparison: the change of each metric, over all pairs and pair by pair."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.document import Size, signed
from reports.plots.figure import MARGIN_NAMES, MARGIN_RIGHT, PALETTE, label_axis, new_figure, styled
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_rows


def pair_dots(frame: pd.DataFrame, bound: float, size: Size) -> Figure:
    """The change of every pair in percent, a row per metric. Colour and shape show better and worse.

    frame: metric, pair, change, worse. bound: the half-width of the shaded band, in percent.
    """
    with styled():
        left = MARGIN_RIGHT if size.is_narrow else MARGIN_NAMES
        figure, [axes] = new_figure(size, gridspec_kw={"left": left / size.width})
        names = list(dict.fromkeys(frame["metric"]))[::-1]
        axes.axvspan(-bound, bound, color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.axvline(0, color=PALETTE["muted"], linewidth=0.8)
        for row, name in enumerate(names):
            rows = frame[frame["metric"] == name]
            spread = np.linspace(-0.14, 0.14, len(rows)) if len(rows) > 1 else np.zeros(1)
            is_worse = np.asarray(rows["worse"], dtype=np.bool_)
            for chosen, colour, mark in ((~is_worse, "good", "o"), (is_worse, "bad", "D")):
                places = rows["change"][chosen], (row + spread)[chosen]
                axes.scatter(*places, c=PALETTE[colour], s=20, marker=mark, linewidths=0, alpha=0.85)
            texts = [
                f"{name}, pair {pair}: {signed_percent(change)} %"
                for pair, change in zip(rows["pair"], rows["change"], strict=True)
            ]
            add_hovers(axes, rows["change"], row + spread, texts)
            middle = float(rows["change"].median())
            axes.plot([middle, middle], [row - 0.24, row + 0.24], color=PALETTE["ink"], linewidth=1.6)
        name_rows(axes, names, size)
        reach = max(2 * bound, 1.1 * float(frame["change"].abs().max()))
        axes.set_xlim(-reach, reach)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5 if size.is_narrow else 9, symmetric=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{signed_percent(value)} %" if value else "0"))
        axes.set_xlabel("change of B against A")
        label_axis(axes, "green circles: better, red diamonds: worse; line: median")
        return figure


def forest(frame: pd.DataFrame, bound: float, unit: str, size: Size) -> Figure:
    """The change of each quantity with its interval, a row per quantity; the smallest effect of interest is a band.

    frame: name, value, lo, hi, worse, decided, in the order of the rows, top first; NaN for a missing bound.
    bound: the smallest effect of interest. All values are in `unit`.
    """
    with styled():
        left = MARGIN_RIGHT if size.is_narrow else MARGIN_NAMES
        figure, [axes] = new_figure(size, gridspec_kw={"left": left / size.width})
        rows = frame.iloc[::-1].reset_index(drop=True)
        axes.axvspan(-bound, bound, color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.axvline(0, color=PALETTE["muted"], linewidth=0.8)
        colours = [
            PALETTE["muted"] if not decided else PALETTE["bad" if worse else "good"]
            for worse, decided in zip(rows["worse"], rows["decided"], strict=True)
        ]
        axes.hlines(rows.index, rows["lo"], rows["hi"], colors=colours, linewidth=2.0)
        axes.scatter(rows["value"], rows.index, c=colours, s=34, zorder=3)
        texts = [
            f"{name}: {signed_percent(value)} ({signed_percent(lo)} to {signed_percent(hi)}) {unit}"
            for name, value, lo, hi in rows[["name", "value", "lo", "hi"]].itertuples(index=False)
        ]
        add_hovers(axes, rows["value"], rows.index, texts)
        ends = np.concatenate([rows[["value", "lo", "hi"]].to_numpy(dtype=float).ravel(), [-1.6 * bound, 1.6 * bound]])
        ends = ends[np.isfinite(ends)]
        pad = 0.06 * (ends.max() - ends.min())
        axes.set_xlim(ends.min() - pad, ends.max() + pad)
        name_rows(axes, [str(name) for name in rows["name"]], size)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: signed_percent(value)))
        axes.set_xlabel(f"change of B against A, {unit}")
        return figure


def signed_percent(value: float) -> str:
    """`+4.2`, `−1.5`, `+16`, `0`."""
    return signed(f"{float(f'{value:.2g}'):,g}".replace("-", "\N{MINUS SIGN}"), is_change=True)
