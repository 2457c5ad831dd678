"""A written report: one self-contained page, figures in the same folder, rebuilt from the saved run alone."""

import base64
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from reports.document import Estimate, Report, Table, format_number, legible_report
from reports.metrics.summary import Analysis, analyse_run
from reports.pages.run_page import build_run_report
from reports.pages.sections.latency_tables import latency_table, summary_table
from reports.pages.sections.run_figures import request_points
from reports.plots.drawn_figures import Drawn, draw_all
from reports.renderers import markdown, write
from reports.renderers.write import ReportPaths, write_page, write_report
from reports.run_store import RunDirectoryError, RunManifest, write_manifest
from tests.support.samples.sample_run import SampleLoad, sample_run, write_sample_run
from tests.support.undrawn_figures import EMPTY, undrawn_figures

EVIL = '<script>alert(1)</script>"><img src=x onerror=alert(2)> $x$ 模型 | [a](http://h)'


@pytest.fixture(scope="module", params=["first figures", pytest.param("all figures", marks=pytest.mark.slow)])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReportPaths:
    """A written report. In the short suite, the figures of its first section are drawn and the others are empty."""
    directory = tmp_path_factory.mktemp("run")
    write_sample_run(directory, SampleLoad(seed=3, duration_s=30))
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "first figures":
            patch.setattr(write, "draw_all", drawn_first)
        return report_runs([directory], directory, ("csv", "json"))


def drawn_first(report: Report) -> dict[str, Drawn]:
    """As `draw_all`, which takes most of the time of a report. The page of hostile text has all figures of a run."""
    first = dataclasses.replace(report, sections=report.sections[:1])
    empty = dict.fromkeys((plot.name for plot in report.plots), Drawn(EMPTY, EMPTY, b"PNG"))
    return empty | draw_all(first)


def report_runs(directories: Sequence[Path], out: Path, formats: Sequence[str] = ()) -> ReportPaths:
    return write_report(build_run_report([analyse_run(directory) for directory in directories]), out, formats)


def markdown_of(*directories: Path) -> str:
    """The Markdown of a report; its figures are not drawn."""
    return markdown.render(legible_report(build_run_report([analyse_run(each) for each in directories]))).decode()


class Elements(HTMLParser):
    """Collects every start tag of a page with its attributes, and checks that tags are closed."""

    VOID = frozenset(("wbr", "meta", "br", "img", "link", "use", "path", "rect", "image"))

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_is_well_formed_and_loads_nothing(written: ReportPaths) -> None:
    page = Elements(written.html.read_text())

    assert page.open == []
    tags = {tag for tag, _ in page.found}
    assert not tags & {"script", "link", "iframe", "object", "img"}
    for _, attributes in page.found:
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith("#")


def test_policy_allows_only_the_one_style_sheet(written: ReportPaths) -> None:
    text = written.html.read_text()
    [style] = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()

    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none';")
    assert f"style-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert "http:" not in style
    assert "https:" not in style


def test_page_has_one_language_title_viewport_and_unique_ids(written: ReportPaths) -> None:
    page = Elements(written.html.read_text())
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]

    assert len(ids) == len(set(ids))
    assert page.found[0] == ("html", {"lang": "en"})
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.found


def test_every_figure_has_alternative_text_in_both_widths(written: ReportPaths) -> None:
    page = Elements(written.html.read_text())
    drawings = [attributes for tag, attributes in page.found if tag == "svg"]

    assert len(drawings) == 2 * len(written.figures) / 2
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)


def test_references_inside_figures_resolve(written: ReportPaths) -> None:
    text = written.html.read_text()
    ids = set(re.findall(r'\bid="([^"]+)"', text))

    references = re.findall(r'(?:url\(#|href="#)([^")]+)', text)

    assert references
    assert set(references) <= ids


def test_figures_follow_the_theme(written: ReportPaths) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", written.html.read_text(), flags=re.DOTALL))

    assert "var(--series-0)" in drawings
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) <= {"#000000"}


def test_figures_are_saved_as_png_and_svg(written: ReportPaths) -> None:
    names = {path.name for path in written.figures}

    assert {"timeline.png", "timeline.svg", "ttft.png", "gaps.svg", "ttft_by_prompt.png", "server.png"} <= names
    assert (written.html.parent / "figures/timeline.png").read_bytes().startswith(b"\x89PNG")


def test_report_starts_with_the_verdict_the_headline_numbers_and_the_timeline(written: ReportPaths) -> None:
    lines = [line for line in written.markdown.read_text().splitlines() if line]

    assert lines[0] == "# 20261120-1359-sample"
    assert re.search(r"\*\*Valid run, \d+ of \d+ requests failed\.\*\*", lines[2])
    assert "output tokens/s with" in lines[2]
    assert lines[3] == "## Summary"
    assert [line.partition(":")[0].removeprefix("- ") for line in lines[4:11]] == [
        *("Output tokens/s", "Requests/s", "TTFT", "TPOT", "Failed", "Objectives", "Cached prompt tokens"),
    ]
    assert lines[11].endswith("(figures/timeline.png)")
    assert lines[13] == "| ms, ↓ better | p50 | p90 | p95 | mean | min | max |"
    assert [line.split("|")[1].strip() for line in lines[15:20]] == ["TTFT", "TPOT", "Gap", "E2E", "Queue time, server"]


def test_every_section_and_figure_has_an_anchor_in_the_contents(written: ReportPaths) -> None:
    text = written.html.read_text()
    page = Elements(text)
    ids = {attributes["id"] for _, attributes in page.found if "id" in attributes}
    [contents] = re.findall(r"<nav.*?</nav>", text, flags=re.DOTALL)

    linked = re.findall(r'href="#([^"]+)"', contents)
    assert linked[:4] == ["summary", "throughput", "latency", "requests"]
    assert set(linked) <= ids
    assert {f"figure-{path.stem}" for path in written.figures} <= ids


def test_each_second_of_the_timeline_shows_its_values_on_hover(written: ReportPaths) -> None:
    text = written.html.read_text()
    [figure] = re.findall(r'<figure class="full" id="figure-timeline">.*?</figure>', text, flags=re.DOTALL)

    titles = re.findall(r"<rect[^>]*><title>([^<]*)</title></rect>", figure)
    assert len(titles) >= 60
    assert re.fullmatch(
        r"6 s: [\d,.]+ output tokens/s, .* in flight, .* ms TTFT p50, .* ms TTFT p95",
        titles[6].partition(", 1 failed")[0],
    )


def test_lines_of_a_command_do_not_break_inside_a_flag(written: ReportPaths) -> None:
    text = written.html.read_text()

    assert '<span class="flag">--max-concurrent-requests</span> 1024' in text


def test_report_states_setup_clipping_and_length_control(written: ReportPaths) -> None:
    text = written.markdown.read_text()

    for fact in (
        "model: preset:tiny-llama",
        "clipped: 7 requests, 2,214 tokens",
        "length control: forced",
        "added by tgi-bench: --max-concurrent-requests 1024",
        "CPU: AMD EPYC 9B14, 2 cores",
    ):
        assert fact in text.replace("\\_", "_")


@pytest.mark.slow
@pytest.mark.parametrize("written", ["all figures"], indirect=True)
def test_report_is_rebuilt_identically_from_the_saved_run(written: ReportPaths) -> None:
    report = build_run_report([analyse_run(written.html.parent)])

    again = write_page(report, written.html.parent / "again.html")

    assert again.read_bytes() == written.html.read_bytes()


def test_csv_and_json_contain_the_tables(written: ReportPaths) -> None:
    csv_path, json_path = written.others

    assert "ms, ↓ better" in csv_path.read_text()
    document = json.loads(json_path.read_text())
    assert document["verdicts"][0]["level"] == "valid"
    assert [section["title"] for section in document["sections"]][:4] == [
        *("Summary", "Throughput"),
        *("Latency", "Requests"),
    ]


@pytest.mark.slow
def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    load = SampleLoad(mode="closed", duration_s=6, warmup_s=0, label=EVIL)
    run = write_sample_run(tmp_path, load)
    run.manifest.target["info"]["model_id"] = EVIL
    run.manifest.notes = EVIL
    write_manifest(tmp_path, run.manifest)

    paths = report_runs([tmp_path, tmp_path], tmp_path / "out", ("csv",))

    page = Elements(paths.html.read_text())
    assert not {"script", "img"} & {tag for tag, _ in page.found}
    assert not any(name.startswith("on") for _, attributes in page.found for name in attributes)
    markdown = paths.markdown.read_text()
    assert "<script>" not in markdown
    assert not re.search(r"(?<!\\)\[a\]\(", markdown)


@pytest.mark.slow
def test_each_of_several_runs_has_a_column_with_its_change_against_the_first(tmp_path: Path) -> None:
    loads = (
        SampleLoad(mode="closed", duration_s=10, run_id="a", label="static batches", slowdown=1.5),
        SampleLoad(mode="closed", duration_s=10, run_id="b", label="continuous batching", seed=1),
    )
    for load in loads:
        write_sample_run(tmp_path / load.run_id, load)

    text = markdown_of(tmp_path / "a", tmp_path / "b")

    assert "| TTFT | static batches |" in text
    assert "| TTFT | continuous batching |" in text
    assert "|  | static batches | continuous batching |" in text
    [speed] = [line for line in text.splitlines() if line.startswith("| Output tokens/s ↑ |")]
    value = r"[\d,.]+ \([\d,.]+–[\d,.]+\)"
    assert re.search(rf"\| {value} \| {value}, \+[\d.]+ % \|", speed)


@functools.cache
def mixed_runs() -> list[Analysis]:
    """A closed and an open loop with other windows and drain limits; the open one sends late. No test changes them."""
    closed = sample_run(SampleLoad(mode="closed", duration_s=20, run_id="a", label="closed"))
    opened = sample_run(SampleLoad(duration_s=30, run_id="b", label="open", seed=1))
    closed.manifest.drain_s = 10.0
    for record in opened.records:
        assert record.t_intended_ns is not None
        record.t_intended_ns -= 200_000_000
    return [Analysis.of(closed), Analysis.of(opened)]


def test_trust_W14_mode_window_and_drain_are_stated_for_each_run() -> None:
    analyses = mixed_runs()

    report = build_run_report(analyses)

    totals, table = (block for block in report.sections[0].blocks if isinstance(block, Table))
    rows = totals.frame.set_index("").T
    assert list(rows["Load"]) == ["closed loop, 16 users", "open loop, poisson, 8 requests/s"]
    assert list(rows["Window"]) == [f"{each.measured.window.length_s:.1f} s" for each in analyses]
    assert list(rows["Drain limit"]) == ["10.0 s", "30.0 s"]
    assert "window of" not in table.note
    assert "closed loop, 16 users; open loop, poisson, 8 requests/s" in report.subtitle


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ({"info": {"model_id": "loaded"}, "model": "tgi"}, "loaded"),
        ({"info": {}, "model": "listed"}, "listed"),
        ({}, "unknown model"),
    ],
)
def test_the_page_names_the_served_model(target: dict[str, Any], shown: str) -> None:
    run = sample_run(SampleLoad(duration_s=20))
    run.manifest.target = target

    assert build_run_report([Analysis.of(run)]).subtitle.startswith(f"{shown} · ")


def test_trust_W14_the_table_and_the_figures_of_a_latency_have_one_origin() -> None:
    analyses = mixed_runs()

    plots = {plot.name: plot for plot in build_run_report(analyses).plots}
    table = summary_table(analyses)

    for analysis in analyses:
        shown = {
            name: table[(table.iloc[:, 0] == name) & (table["run"] == analysis.label)]["p50"].item()
            for name in ("TTFT", "E2E")
        }
        median = {name: each.value if isinstance(each, Estimate) else each for name, each in shown.items()}
        assert f"{analysis.label}: median {format_number(median['TTFT'])} ms" in plots["ttft"].alt
        assert request_points(analysis, "e2e_s", "output_tokens")["value_ms"].median() == pytest.approx(median["E2E"])
    rows = list(latency_table(analyses[1]).iloc[:, 0])
    assert {"TTFT from send", "TTFT from schedule"} <= set(rows)
    assert "TTFT" not in rows


@pytest.mark.parametrize(
    ("load", "remedy"),
    [
        (SampleLoad(duration_s=0.5, warmup_s=0), "run longer"),
        (SampleLoad(duration_s=4, failure_share=1.0), "see the causes of the failed requests"),
    ],
)
def test_short_and_failed_runs_have_a_report(tmp_path: Path, load: SampleLoad, remedy: str) -> None:
    write_sample_run(tmp_path, load)

    text = markdown_of(tmp_path)

    assert "**Not a valid measurement" in text
    assert remedy in text
    assert "for orientation only" in text


def test_run_without_requests_has_a_report(tmp_path: Path) -> None:
    write_manifest(tmp_path, RunManifest("empty"))

    with undrawn_figures():
        paths = report_runs([tmp_path], tmp_path)

    assert "**Not a valid measurement.**" in paths.markdown.read_text()


def test_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        report_runs([tmp_path], tmp_path)


def test_report_of_runs_in_memory_is_the_same(written: ReportPaths) -> None:
    report = build_run_report([Analysis.of(sample_run(SampleLoad(seed=3, duration_s=30)))])

    assert report.verdicts[0].sentence in written.markdown.read_text().replace("\\_", "_")


def test_constant_lengths_have_no_figure() -> None:
    run = sample_run(SampleLoad(mode="closed", duration_s=10))
    for record in run.records:
        record.input_tokens = 128

    names = [plot.name for plot in build_run_report([Analysis.of(run)]).plots]

    assert "ttft_by_prompt" not in names
    assert "e2e_by_output" in names


def test_pages_1_several_valid_runs_have_one_verdict_with_the_best_of_them() -> None:
    loads = (SampleLoad(label="first"), SampleLoad(label="slower", slowdown=1.5))
    shapes = (dataclasses.replace(load, duration_s=30, mode="closed", failure_share=0) for load in loads)
    found = [Analysis.of(sample_run(shape)) for shape in shapes]

    [line] = build_run_report(found).verdicts
    verdict = {"verdict": {"status": "degraded", "reasons": []}}
    bad = dataclasses.replace(found[1].named("third"), summary=found[1].summary | verdict)
    lines = build_run_report([bad, *found]).verdicts

    assert line.word == "2 valid runs"
    assert line.sentence.startswith("Most output tokens/s: first, ")
    assert "Lowest TTFT p95: first, " in line.sentence
    assert [each.word for each in lines] == ["Degraded run", "2 valid runs"]
    assert lines[0].label == "third"


@pytest.mark.slow
def test_the_first_line_marks_an_unsupported_percentile_as_the_tile_does() -> None:
    short = Analysis.of(sample_run(SampleLoad(duration_s=6, warmup_s=1)))
    long = Analysis.of(sample_run(SampleLoad(mode="closed", duration_s=120, warmup_s=5)))

    assert re.search(
        r"TTFT is [~≥]?[\d.]+ ms at the median and ≥[\d.,]+ ms at", build_run_report([short]).verdicts[0].sentence
    )
    assert re.search(
        r"TTFT is [\d.]+ ms at the median and [\d.,]+ ms at", build_run_report([long]).verdicts[0].sentence
    )


def test_pages_1_a_page_of_one_run_names_requests_without_the_id_of_the_run() -> None:
    """At 390 px, an id with that of the run was broken into five lines."""
    run = sample_run(SampleLoad(seed=3, duration_s=30))
    sections = {each.title: each for each in build_run_report([Analysis.of(run)]).sections}

    tables = {each.title: each.frame for each in sections["Time breakdown"].blocks if isinstance(each, Table)}

    assert all(re.fullmatch(r"\d{5}", each) for each in tables["The slowest requests"]["request"])
    assert tables["An average request"]["request"].tolist() == ["mean"]


def test_pages_1_runs_with_one_id_have_their_own_figures() -> None:
    """Copies of a run have the same id: each heat map showed the numbers of the last."""
    fast, slow = (Analysis.of(sample_run(SampleLoad(seed=3, duration_s=30, slowdown=each))) for each in (1.0, 3.0))

    report = legible_report(build_run_report([fast.named("fast"), slow.named("slow")]))

    names = [plot.name for plot in report.plots]
    assert len(names) == len(set(names))
    maps = {plot.name: plot for plot in report.plots if plot.name.startswith("ttft_by_lengths")}
    assert [plot.caption.partition(":")[0] for plot in maps.values()] == ["fast", "slow"]
