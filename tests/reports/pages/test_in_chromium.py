"""Every kind of page in headless Chromium, at three widths, light, dark and in print: nothing overflows or overlaps."""

import html
import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.text import Text
from PIL import Image

from reports.plots.drawn_figures import draw_all
from reports.plots.figure import HALF
from reports.renderers.write import write_report
from tests.support.samples.sample_pages import SAMPLE_PAGES

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHECK = Path(__file__).parents[2] / "support" / "page_check.js"
PICTURE = Path(__file__).parents[3] / "docs" / "picture.py"
WIDTHS = (390, 1280, 1920)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
@pytest.mark.parametrize("kind", SAMPLE_PAGES)
def test_a_page_has_no_defect_at_any_width_light_dark_and_in_print(tmp_path: Path, kind: str) -> None:
    page = write_report(SAMPLE_PAGES[kind](), tmp_path).html.read_text(encoding="utf-8")

    found = {mode: defects_of(page, tmp_path, mode) for mode in ("light", "dark", "print")}

    assert found == {mode: [] for mode in found}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_the_check_finds_each_defect(tmp_path: Path) -> None:
    page = """<!doctype html><html><body style="background: white">
    <p style="width: 3000px">wide</p><p style="overflow: hidden; width: 20px; white-space: nowrap">clipped text</p>
    <p style="color: #bbb">pale</p><img src="missing.png" width="9" height="9">
    <div class="scroll" style="width: 60px; overflow-x: auto; background-image: linear-gradient(white, white)">
    <table><thead><tr><th>p50</th><th style="padding-left: 90px">p95</th></tr></thead></table></div>
    <div class="verdict"><p class="word" style="display: flex; align-items: center; width: 90px">
    <span class="dot" style="flex: none; width: 9px; height: 9px"></span>a verdict of more than two lines</p></div>
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
        "p95 needs scrolling",
        "the dot is below the first line",
    ):
        assert defect in found


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_a_picture_of_a_page_has_its_first_screen_in_few_colours(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<html><body style="margin: 0; background: linear-gradient(red, blue); height: 3000px">')

    runpy.run_path(str(PICTURE))["take_picture"](page, tmp_path / "page.png")

    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (1280, 700)
        colours = [colour for _, colour in picture.convert("RGB").getcolors() or ()]
    assert 32 < len(colours) <= 64
    assert (255, 255, 255) not in colours


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLE_PAGES)
def test_every_axis_of_a_page_is_labelled(kind: str) -> None:
    for plot in SAMPLE_PAGES[kind]().plots:
        figure = plot.draw(HALF)
        for axes in figure.axes:
            is_named = axes.get_title(loc="left") or axes.get_ylabel()
            assert is_named or not has_numbers(axes.get_yticklabels()), f"{plot.name}: vertical axis"
        last = figure.axes[-1]
        assert last.get_xlabel() or not has_numbers(last.get_xticklabels()), f"{plot.name}: horizontal axis"


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLE_PAGES)
def test_pages_1_every_figure_with_points_shows_their_values(kind: str) -> None:
    drawn = draw_all(SAMPLE_PAGES[kind](), has_png=False)

    assert [name for name, each in drawn.items() if "<title>" not in each.wide_svg] == []


def has_numbers(labels: Sequence[Text]) -> bool:
    """Whether an axis has numbers as labels; an axis with names needs no title."""
    return any(re.fullmatch(r"[\d.,k%+−-]+", label.get_text()) for label in labels)


HOST = """<!doctype html><html><body><script>
const found = [];
addEventListener("message", (event) => { found.push(event.data); document.title = JSON.stringify(found); });
</script>%s</body></html>"""


def defects_of(page: str, directory: Path, mode: str) -> list[str]:
    """The defects that the check finds in copies of the page; the policy of the copies allows the script of the check.

    The copies are in frames of each width, because a window has a minimum width. For print, the print rules apply to
    the screen.
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
