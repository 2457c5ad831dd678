"""Every kind of page in headless Chromium, at three widths, light, dark and in print: nothing overflows or overlaps."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.text import Text

from reports.document import Report
from reports.gate.compare import CompareOptions, judge
from reports.gate.side_run import Pair, SideRun
from reports.metrics.summary import Analysis
from reports.metrics.sweep import LoadPoint, Sweep
from reports.pages.comparison_page import build_comparison_report
from reports.pages.run_page import build_run_report
from reports.pages.study.page import build_study_report
from reports.pages.sweep_page import build_sweep_report
from reports.plots.figure import HALF
from reports.renderers.write import write_report
from tests.support.samples.sample_run import SampleLoad, sample_run
from tests.support.samples.sample_study import sample_study

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHECK = Path(__file__).parents[2] / "support" / "page_check.js"
WIDTHS = (390, 1280, 1920)


def run_report() -> Report:
    return build_run_report([Analysis.of(sample_run(SampleLoad(seed=3, duration_s=30)))])


def runs_report() -> Report:
    loads = (
        SampleLoad(label="first"),
        SampleLoad(label="slower", slowdown=1.3),
        SampleLoad(label="closed", mode="closed"),
    )
    return build_run_report([Analysis.of(sample_run(replace(load, duration_s=30, seed=1))) for load in loads])


def sweep_report() -> Report:
    points = []
    for rate in (2.0, 4.0, 8.0, 16.0):
        run = sample_run(replace(SampleLoad(), rate=rate, duration_s=30, failure_share=0.0))
        run.manifest.objectives = [{"metric": "ttft_p95_ms", "max": 400}]
        points.append(LoadPoint(rate, (Analysis.of(run),)))
    return build_sweep_report(Sweep("rate", tuple(points), 0.95, ("tgi-bench", "sweep", "--points", "2,4,8,16")))


def comparison_report() -> Report:
    def side(factor: float) -> SideRun:
        return SideRun(
            "x", {"tpot_p50_ms": 20 * factor, "ttft_p50_ms": 50 / factor, "output_tokens_per_s": 900 / factor}
        )

    pairs = [Pair(side(1.0), side(factor)) for factor in (1.05, 1.10, 1.07, 1.12)]
    return build_comparison_report(judge(pairs, CompareOptions(shown=())), ("tgi-bench compare A B",))


def study_report() -> Report:
    return build_study_report(sample_study())


PAGES: dict[str, Callable[[], Report]] = {
    "run": run_report,
    "runs": runs_report,
    "sweep": sweep_report,
    "comparison": comparison_report,
    "study": study_report,
}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
@pytest.mark.parametrize("kind", PAGES)
def test_a_page_has_no_defect_at_any_width_light_dark_and_in_print(tmp_path: Path, kind: str) -> None:
    page = write_report(PAGES[kind](), tmp_path).html.read_text(encoding="utf-8")

    found = {mode: defects_of(page, tmp_path, mode) for mode in ("light", "dark", "print")}

    assert found == {mode: [] for mode in found}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_the_check_finds_each_defect(tmp_path: Path) -> None:
    page = """<!doctype html><html><body style="background: white">
    <p style="width: 3000px">wide</p><p style="overflow: hidden; width: 20px; white-space: nowrap">clipped text</p>
    <p style="color: #bbb">pale</p><img src="missing.png" width="9" height="9">
    <figure id="f"><svg role="img" aria-label="x" width="200" height="50"><text x="10" y="20">one</text>
    <text x="12" y="20">two</text><text x="190" y="40">outside</text></svg></figure></body></html>"""

    found = " | ".join(defects_of(page, tmp_path, "light"))

    for defect in (
        "the page is 30",
        'clipped: p. "clipped text"',
        'contrast 1.92: p. "pale"',
        "a picture without alt text",
        'f: "one" overlaps "two"',
        'f: "outside" is outside of the figure',
        "request to missing.png",
    ):
        assert defect in found


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAGES)
def test_every_axis_of_a_page_is_labelled(kind: str) -> None:
    for plot in PAGES[kind]().plots:
        figure = plot.draw(HALF)
        for axes in figure.axes:
            is_named = axes.get_title(loc="left") or axes.get_ylabel()
            assert is_named or not has_numbers(axes.get_yticklabels()), f"{plot.name}: vertical axis"
        last = figure.axes[-1]
        assert last.get_xlabel() or not has_numbers(last.get_xticklabels()), f"{plot.name}: horizontal axis"


def has_numbers(labels: Sequence[Text]) -> bool:
    """Whether an axis has numbers as labels; names explain themselves."""
    return any(re.fullmatch(r"[\d.,k%+−-]+", label.get_text()) for label in labels)


HOST = """<!doctype html><html><body><script>
const found = [];
addEventListener("message", (event) => { found.push(event.data); document.title = JSON.stringify(found); });
</script>%s</body></html>"""


def defects_of(page: str, directory: Path, mode: str) -> list[str]:
    """The defects that the check finds in copies of the page in frames of each width; their policy allows its script.

    Frames, because a window has a least width. In print, the rules of print apply to the screen.
    """
    copy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    if mode == "print":
        copy = copy.replace("@media print", "@media all").replace("@media screen and", "@media not all and")
    (directory / "copy.html").write_text(
        copy.replace("</body>", f"<script>{CHECK.read_text()}</script></body>"), encoding="utf-8"
    )
    widths = (1280,) if mode == "print" else WIDTHS
    frames = (f'<iframe src="copy.html" width="{width}" height="900" frameborder="0"></iframe>' for width in widths)
    host = directory / "host.html"
    host.write_text(HOST % "".join(frames), encoding="utf-8")
    colours = ("--blink-settings=preferredColorScheme=0",) if mode == "dark" else ()
    command = (
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *colours),
        *(f"--user-data-dir={directory / 'profile'}", "--window-size=2000,1000", "--virtual-time-budget=5000"),
        *("--dump-dom", host.as_uri()),
    )
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    [title] = re.findall(r"<title>(.*?)</title>", dumped, flags=re.DOTALL)
    found = json.loads(html.unescape(title))
    assert sorted(each["width"] for each in found) == sorted(widths)
    return [f"{each['width']} px: {defect}" for each in found for defect in each["defects"]]
