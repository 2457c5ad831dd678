"""The page of a history: the metrics that changed, the commits before and after each change, and every commit."""

from collections.abc import Sequence

import pandas as pd

from reports.document import Block, Plot, Report, Section, Table, VerdictLine
from reports.gate.history import MAX_P, MIN_SEGMENT, CommitPoint, LevelChange
from reports.gate.side_run import FRACTIONS
from reports.metrics.titles import better_direction, metric_heading, metric_title
from reports.plots import noise_plots
from reports.plots.comparison_plots import signed_percent

CHANGES_NOTE = (
    f"Found by a permutation test (p at most {MAX_P:g}) with at least {MIN_SEGMENT} commits on each side; a change is "
    "advice, not a verdict. If many metrics are checked, p is sometimes small by chance."
)


def build_history_report(
    name: str, points: Sequence[CommitPoint], changes: Sequence[LevelChange], metrics: Sequence[str]
) -> Report:
    """The report of a table of commits: `changes` were found in `metrics`. The newest series comes first."""
    series = list(dict.fromkeys(point.series for point in reversed(points)))
    sections = []
    if changes:
        newest_first = sorted(changes, key=lambda change: series.index(change.series))
        sections.append(Section("Changes", (Table("", changes_table(newest_first), CHANGES_NOTE),)))
    for number, key in enumerate(series):
        own = [point for point in points if point.series == key]
        in_series = [change for change in changes if change.series == key]
        title = "Metrics by commit" if len(series) == 1 else f"Series {number + 1}: {own[-1].device}"
        figures = _figures(number, own, in_series, metrics)
        sections.append(Section(title, (*figures, Table("Commits", commits_table(own, metrics)))))
    kinds = "1 series" if len(series) == 1 else f"{len(series)} series of one device and load each"
    subtitle = f"{len(points):,} {'commit' if len(points) == 1 else 'commits'} in {kinds}"
    return Report(f"History {name}", subtitle, (history_verdict(points, changes, metrics),), tuple(sections))


def history_verdict(
    points: Sequence[CommitPoint], changes: Sequence[LevelChange], metrics: Sequence[str]
) -> VerdictLine:
    """Whether a metric became worse in the newest series, and where."""
    newest = points[-1].series
    current = [change for change in changes if change.series == newest]
    worse = [change for change in current if change.is_worse]
    reasons = tuple(change_sentence(change) for change in (*worse, *(each for each in current if not each.is_worse)))
    if worse:
        names = ", ".join(dict.fromkeys(_short(change.metric) for change in worse))
        return VerdictLine("regression", "Became worse", f"{names}: worse than before.", reasons)
    count = sum(point.series == newest for point in points)
    if count < 2 * MIN_SEGMENT:
        sentence = f"{count} of the {2 * MIN_SEGMENT} commits that the search for changes needs."
        return VerdictLine("inconclusive", "Too few commits", sentence, reasons)
    if current:
        names = ", ".join(dict.fromkeys(_short(change.metric) for change in current))
        return VerdictLine("improvement", "Became better", f"{names}: better than before.", reasons)
    checked = ", ".join(map(_short, metrics))
    return VerdictLine("pass", "No change", f"{count} commits, and no change of {checked}.")


def change_sentence(change: LevelChange) -> str:
    """A change in one sentence: `TPOT p50: +10 % (worse) between c19 and c20.`"""
    word = "worse" if change.is_worse else "better"
    return f"{_short(change.metric)}: {_size(change)} ({word}) between {change.before} and {change.first}."


def full_change_sentence(change: LevelChange) -> str:
    """A change in one sentence, with its p value, the commits around it and the device."""
    word = "worse" if change.is_worse else "better"
    return (
        f"{_short(change.metric)}: {_size(change)} ({word}) between {change.before} and {change.first}, "
        f"p = {change.p:.4f}, {change.points[0]} commits before and {change.points[1]} after, on {change.device}."
    )


def _short(name: str) -> str:
    """The title of a metric for sentences: `TPOT p50`, without the unit."""
    return metric_heading(name)


def _size(change: LevelChange) -> str:
    return f"{signed_percent(100 * change.size)} {'points' if change.metric in FRACTIONS else '%'}"


def changes_table(changes: Sequence[LevelChange]) -> pd.DataFrame:
    """A row for each change."""
    return pd.DataFrame(
        {
            "metric": f"{metric_title(change.metric)} {better_direction(change.metric).mark}",
            "change": _size(change),
            "is": "worse" if change.is_worse else "better",
            "last commit before": change.before,
            "first commit after": change.first,
            "commits before, after": f"{change.points[0]}, {change.points[1]}",
            "p": f"{change.p:.4f}",
            **({"device": change.device} if len({each.series for each in changes}) > 1 else {}),
        }
        for change in changes
    )


def commits_table(points: Sequence[CommitPoint], metrics: Sequence[str]) -> pd.DataFrame:
    """A row for each commit, the newest first."""
    return pd.DataFrame(
        {
            "commit": point.commit,
            "measured (UTC)": point.measured_at[:16].replace("T", " "),
            "runs": point.runs,
            **{
                f"{metric_title(name)} {better_direction(name).mark}": point.metrics.get(name)
                for name in metrics
                if any(name in each.metrics for each in points)
            },
        }
        for point in reversed(points)
    ).astype(object)


def _figures(
    number: int, points: Sequence[CommitPoint], changes: Sequence[LevelChange], metrics: Sequence[str]
) -> list[Block]:
    found: list[Block] = []
    for name in metrics:
        known = [point for point in points if name in point.metrics]
        if len(known) < 2:
            continue
        commits = [point.commit for point in known]
        own = [(commits.index(change.first), change.is_worse) for change in changes if change.metric == name]
        title, values = metric_title(name), [point.metrics[name] for point in known]
        found.append(_figure(f"history_{number + 1}_{name}", title, name, commits, values, sorted(own)))
    return found


def _figure(
    file: str,
    title: str,
    name: str,
    commits: Sequence[str],
    values: Sequence[float],
    changes: Sequence[tuple[int, bool]],
) -> Plot:
    count = (
        f"{len(changes)} {'change' if len(changes) == 1 else 'changes'} of level" if changes else "no change of level"
    )
    return Plot(
        file,
        title,
        f"Medians of {len(commits)} commits, {count}. Lines: the mean of each level; vertical: a change, red if worse.",
        f"{title} of {len(commits)} commits with {count}.",
        lambda size: noise_plots.level_by_commit(
            commits, values, changes, f"{title} {better_direction(name).mark}", size
        ),
    )
