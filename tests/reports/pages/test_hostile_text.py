"""Hostile text in every field of a run: the report is inert and legible, in every format."""

import csv
import dataclasses
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from reports.document import Report, VerdictLine
from reports.export import write_requests_csv
from reports.gate.compare import judge
from reports.gate.comparison import CompareOptions
from reports.gate.side_run import Pair, SideRun
from reports.metrics.summary import Analysis, analyse_run
from reports.metrics.sweep import LoadPoint, Sweep
from reports.pages import ci
from reports.pages.comparison_page import build_comparison_report
from reports.pages.comparison_runs import runs_sections
from reports.pages.run_page import build_run_report
from reports.pages.study.page import build_study_report
from reports.pages.sweep_page import build_sweep_report
from reports.plots.drawn_figures import Drawn, saved
from reports.plots.figure import HALF
from reports.renderers import write
from reports.renderers.write import ReportPaths, write_report
from reports.run_schema import FIELDS
from reports.run_store import JsonlWriter, RunManifest, write_client, write_manifest
from reports.saved_run import load_run
from reports.text import UNSEEN, legible
from tests.support.samples.sample_run import SampleLoad, sample_run
from tests.support.samples.sample_study import sample_study

HOSTILE = (
    "=cmd|' /C calc'!A0 </title><script>alert(1)</script> \"onload='x' \x1b[31mred \ud800 \u202eexe.gnp ]]> &amp; $x$ |"
)
# The script of the copy buttons, on pages that have one. Its hash is in the page's policy.
COPY_SCRIPT = (files("reports.renderers") / "copy.js").read_text()
MARK = "⟨1B⟩[31mred ⟨D800⟩ ⟨202E⟩exe.gnp"


def _hostile(value: Any) -> Any:
    """The same value with every text in it replaced."""
    match value:
        case str():
            return HOSTILE
        case dict():
            return {key: _hostile(each) for key, each in value.items()}
        case list():
            return [_hostile(each) for each in value]
        case _:
            return value


# Keys that the file format requires.
KEPT = ("mode", "started_at")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ReportPaths:
    directory = tmp_path_factory.mktemp("run") / "hostile"
    directory.mkdir()
    run = sample_run(SampleLoad(seed=3, duration_s=25, workers=2))
    manifest = run.manifest
    fields = {name: getattr(manifest, name) for name in ("run_id", "label", "notes", "version", "revision", "python")}
    fields |= {name: getattr(manifest, name) for name in ("command", "config", "labels", "libraries", "machine")}
    fields |= {name: getattr(manifest, name) for name in ("workload_hash", "length_control", "target", "stop_reason")}
    config = _hostile(fields["config"]) | {"mode": manifest.mode, "rate": 8.0}
    changed = dataclasses.replace(manifest, **_hostile(fields) | {"config": config, "label": HOSTILE})
    write_manifest(directory, RunManifest.from_json(json.loads(json.dumps(changed.to_json()))))
    write_client(directory, run.client | {"lost": [{"worker": 1, "share": 0.5, "because": HOSTILE}]})
    texts = [
        name for name, each in FIELDS.items() if "str" in str(each.type) and name not in ("phase", "tokens_source")
    ]
    with JsonlWriter(directory / "requests.jsonl") as writer:
        for number, record in enumerate(run.records):
            row = record.to_json()
            row |= {name: HOSTILE for name in texts if name != "status" or number % 7 == 0}
            writer.write(row | {"request_id": f"{number}{HOSTILE}"})
    with JsonlWriter(directory / "server_metrics.jsonl") as writer:
        for line in run.server_metrics:
            writer.write(line | {"labels": f'{{x="{HOSTILE}"}}'})
            writer.write(line | {"name": HOSTILE})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "draw_all", drawn_at_one_width)
        return write_report(build_run_report([analyse_run(directory)]), directory, ("csv", "json"))


def drawn_at_one_width(report: Report, **_: Any) -> dict[str, Drawn]:
    """As `draw_all`, in half of its time: both widths have the same texts, and the tests read no PNG."""
    files = {plot.name: saved(plot.draw(HALF), "svg").decode() for plot in report.plots}
    return {name: Drawn(svg, svg, b"") for name, svg in files.items()}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self.shown = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts.append(data)
        else:
            self.shown += data


def test_the_page_has_no_script_and_shows_the_text_as_text(written: ReportPaths) -> None:
    page = Page(written.html.read_text(encoding="utf-8"))

    assert "script" not in page.tags
    assert page.handlers == []
    assert "<script>alert(1)</script>" in page.shown
    assert MARK in page.shown


def test_no_output_holds_an_escape_a_lone_surrogate_or_a_direction_override(written: ReportPaths) -> None:
    for path in (written.html, written.markdown, *written.others, *written.figures):
        if path.suffix != ".png":
            text = path.read_text(encoding="utf-8")
            assert UNSEEN.search(text) is None, path.name


def test_every_figure_is_well_formed_and_has_a_safe_file_name(written: ReportPaths) -> None:
    for path in written.figures:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", path.name)
        if path.suffix == ".svg":
            tags = {each.tag.rpartition("}")[2] for each in ElementTree.parse(path).iter()}
            assert not tags & {"script", "foreignObject", "image", "a"}


def test_markdown_has_no_untrusted_markup(written: ReportPaths) -> None:
    text = re.sub(r"```.*?```", "", written.markdown.read_text(encoding="utf-8"), flags=re.DOTALL)

    assert re.search(r"(?<!\\)<", text) is None
    assert MARK.replace("[", "\\[") in text


def test_no_cell_of_a_table_starts_a_formula(written: ReportPaths) -> None:
    for path in (
        next(path for path in written.others if path.suffix == ".csv"),
        write_requests_csv(written.html.parent),
    ):
        with path.open(encoding="utf-8", newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert any("cmd|" in cell for cell in cells)
        assert not [cell for cell in cells if re.match(r"\s*[=@]|\s*[+-](?![\d.])", cell)]


def test_the_saved_run_keeps_valid_unicode(written: ReportPaths) -> None:
    record = next(iter(load_run(written.html.parent).records))

    assert record.prompt_id == HOSTILE.replace("\ud800", "\ufffd")


def test_legible_text_keeps_every_script(written: ReportPaths) -> None:
    for text in ("模型", "שלום", "नमस्ते", "👩🏽", "a\tb\nc", "naïve"):
        assert legible(text) == text


def _is_inert(paths: ReportPaths) -> None:
    """Asserts that a page is inert and legible in every format."""
    page = Page(paths.html.read_text(encoding="utf-8"))
    assert {text for text in page.scripts if text.strip()} <= {COPY_SCRIPT}
    assert page.handlers == []
    assert MARK in page.shown
    for path in (paths.html, paths.markdown, *paths.others, *paths.figures):
        if path.suffix != ".png":
            assert UNSEEN.search(path.read_text(encoding="utf-8")) is None, path.name
    markdown = re.sub(r"```.*?```", "", paths.markdown.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.search(r"(?<!\\)<", markdown) is None


@pytest.mark.slow
def test_a_sweeps_text_is_inert_too(written: ReportPaths, tmp_path: Path) -> None:
    analysis = Analysis.of(load_run(written.html.parent))
    points = tuple(LoadPoint(load, (analysis,)) for load in (1.0, 2.0))
    sweep = Sweep("concurrency", points, 0.95, ("tgi-bench", HOSTILE), ("valid", HOSTILE), (2.0, 1.0))

    _is_inert(write_report(build_sweep_report(sweep), tmp_path, ("csv", "json")))


@pytest.mark.slow
def test_a_comparisons_text_is_inert_too(written: ReportPaths, tmp_path: Path) -> None:
    values = {"output_tokens_per_s": 10.0, "ttft_p50_ms": 1.0, "tpot_p50_ms": 1.0, "error_rate": 0.0}
    pairs = [Pair(SideRun(HOSTILE, values), SideRun(HOSTILE, values, "degraded", (HOSTILE,)))] * 2
    comparison = judge(pairs, CompareOptions(pairs=2, shown=()))
    of_runs = runs_sections([written.html.parent], [written.html.parent], HOSTILE, HOSTILE)

    _is_inert(write_report(build_comparison_report(comparison, (HOSTILE,), of_runs), tmp_path, ("csv", "json")))


def test_ci_output_is_inert_too() -> None:
    comparison = judge([Pair(SideRun(HOSTILE, {}), SideRun(HOSTILE, {}, "invalid", (HOSTILE,)))], CompareOptions())
    texts = {
        "junit": ci.junit(comparison, 1.0).decode(),
        "summary": ci.step_summary(comparison, (HOSTILE,)),
        "comment": ci.comment(comparison, (HOSTILE,)),
        "annotations": ci.annotations(comparison),
        "output": ci.step_output(comparison),
    }

    for name, text in texts.items():
        assert re.search("[\x00-\x08\x0b-\x1f\ud800-\udfff\u202a-\u202e]", text) is None, name
        assert text.encode(), name
    assert "&lt;script&gt;" in texts["junit"]


@pytest.mark.slow
def test_a_studys_text_is_inert_too(tmp_path: Path) -> None:
    study = sample_study(24)
    trials = tuple(
        dataclasses.replace(each, reason=HOSTILE, log_line=HOSTILE, cause=HOSTILE, phase=HOSTILE)
        for each in study.trials
    )
    knobs = (*study.knobs[:-1], dataclasses.replace(study.knobs[-1], unset=HOSTILE))
    hostile = dataclasses.replace(
        study,
        name=HOSTILE,
        verdict=VerdictLine("improvement", HOSTILE, HOSTILE, (HOSTILE,)),
        trials=trials,
        knobs=knobs,
        limits=(HOSTILE,),
        facts=((HOSTILE, ((HOSTILE, HOSTILE),)),),
        commands=(HOSTILE,),
    )

    _is_inert(write_report(build_study_report(hostile), tmp_path, ("csv", "json")))
