"""The output of a comparison for continuous integration."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from reports.gate.compare import judge
from reports.gate.comparison import CompareOptions, Comparison
from reports.gate.side_run import Pair, SideRun
from reports.pages.ci import (
    COMMENT_MARKER,
    CiEnvironment,
    annotations,
    comment,
    dot_plot,
    gitlab_metrics,
    junit,
    step_output,
    step_summary,
    write_ci,
)
from reports.pages.comparison_page import build_comparison_report
from reports.renderers.write import write_report
from tests.support.samples.gate_side import side
from tests.support.samples.junit_schema import problems
from tests.support.undrawn_figures import undrawn_figures

OPTIONS = CompareOptions(shown=())


@pytest.fixture(scope="module")
def regression() -> Comparison:
    """Slower decoding, inconclusive TTFT, better throughput, unchanged errors."""
    tpot, ttft, speed = (1.10, 1.11, 1.09, 1.10), (0.8, 1.3, 1.1, 0.9), (1.10, 1.11, 1.09, 1.10)
    pairs = [
        Pair(side("main"), side("pr\n<b>1</b>", tpot_p50_ms=20 * a, ttft_p50_ms=50 * b, output_tokens_per_s=1000 * c))
        for a, b, c in zip(tpot, ttft, speed, strict=True)
    ]
    return judge(pairs, CompareOptions(shown=("error_rate",), require=("tpot_p50_ms < 21",)))


def test_tuning_12_6_junit_has_a_case_per_metric(regression: Comparison) -> None:
    root = ElementTree.fromstring(junit(regression, 12.5))
    [suite] = root.findall("testsuite")
    cases = {case.get("name"): case for case in suite.findall("testcase")}

    assert root.tag == "testsuites"
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "5",
        "failures": "2",
        "errors": "0",
        "skipped": "1",
        "time": "12.500",
    }
    failure = cases["tpot_p50_ms"].find("failure")
    assert failure is not None
    assert "+10.0 %" in failure.get("message", "")
    assert "limit 2.96 %" in failure.get("message", "")
    assert cases["ttft_p50_ms"].find("skipped") is not None
    assert [child.tag for child in cases["output_tokens_per_s"]] == []
    properties = {each.get("name"): each.get("value") for each in suite.iter("property")}
    assert properties["tpot_p50_ms.a"] == "20"
    assert properties["tpot_p50_ms.b"] == "22"


HOSTILE = "<script>alert(1)</script>\x00\x1b[31m =cmd|' /C calc'!A0 ]]> \ud800 \u202e&amp; %0A::error::\r\n"


def hostile_comparison() -> Comparison:
    pairs = [Pair(side(HOSTILE), side(HOSTILE, tpot_p50_ms=30.0 + i)) for i in range(4)]
    return judge(pairs, CompareOptions(shown=()))


@pytest.mark.parametrize("kind", ["regression", "refused", "hostile", "empty"])
def test_tuning_12_6_junit_validates_against_the_common_schemas(regression: Comparison, kind: str) -> None:
    refused = judge([Pair(side(HOSTILE), SideRun(HOSTILE, {}, "invalid", (HOSTILE,)))], OPTIONS)
    made = {"regression": regression, "refused": refused, "hostile": hostile_comparison(), "empty": judge([], OPTIONS)}

    root = ElementTree.fromstring(junit(made[kind], 12.5))

    assert problems(root) == []


def test_hostile_names_are_inert_wherever_they_are_shown() -> None:
    comparison = hostile_comparison()

    summary, note, lines = step_summary(comparison), comment(comparison), annotations(comparison)

    assert "<script>" not in summary + note
    assert summary.encode()
    assert all(line.startswith(("::error ", "::warning ")) for line in lines.splitlines())
    assert "<script>" not in junit(comparison, 1.0).decode()
    assert "\x1b" not in junit(comparison, 1.0).decode() + summary


def test_refusal_with_hostile_text_is_one_annotation_line() -> None:
    refused = judge([Pair(side(), SideRun(HOSTILE, {}, "invalid", (HOSTILE,)))], OPTIONS)

    [line] = annotations(refused).splitlines()

    assert line.startswith("::error title=Performance gate::")
    assert "%0D%0A" in line


def test_junit_of_refused_runs_is_an_error() -> None:
    refused = judge([Pair(side(), SideRun("b", {}, "invalid", ("too few \x00 requests",)))], OPTIONS)
    root = ElementTree.fromstring(junit(refused, 1.0))

    error = root.find(".//error")
    assert error is not None
    assert "is invalid: too few � requests" in error.get("message", "")


def test_tuning_12_6_annotations_are_escaped_and_limited(regression: Comparison) -> None:
    lines = annotations(regression).splitlines()

    assert [line.split("::")[1].split(" ")[0] for line in lines] == ["error", "error", "warning", "warning", "notice"]
    assert "and this noise, 80 %25 of comparisons find only a regression of this size: TTFT p50" in lines[3]
    assert "+10.0 %25" in lines[0]
    assert not any("% " in line for line in lines)


def test_twenty_regressions_make_ten_errors() -> None:
    names = tuple(f"ttft_p{p}_ms" for p in range(50, 70))
    pairs = [Pair(SideRun("a", dict.fromkeys(names, 10.0)), SideRun("b", dict.fromkeys(names, 20.0)))] * 4

    lines = annotations(judge(pairs, CompareOptions(gated=names, shown=()))).splitlines()

    assert len(lines) == 10


def test_step_output_names_verdict_and_worst_metric(regression: Comparison) -> None:
    assert step_output(regression) == "verdict=regression\nworst_metric=tpot_p50_ms\nworst_effect=9.998\n"


def test_step_summary_has_verdict_table_dots_and_commands(regression: Comparison) -> None:
    text = step_summary(regression, ["tgi-bench compare --server-a a --server-b b"])

    assert "**Regression.**" in text
    assert "| TPOT p50, ms ↓ |" in text
    assert "better [" in text
    assert "tgi-bench compare --server-a a" in text
    assert "figures/" not in text
    assert "<b>" not in text


def test_dots_of_a_slower_side_lie_on_the_worse_half(regression: Comparison) -> None:
    [line] = [line for line in dot_plot(regression).splitlines() if line.startswith("TPOT p50")]
    plot = line[line.index("[") + 1 : line.index("]")]

    assert plot[:20].strip() == ""
    assert plot[20] == "|"
    assert sum({"•": 1, "2": 2, "3": 3}.get(cell, 0) for cell in plot) == 4


def test_pairs_at_one_place_are_counted() -> None:
    comparison = judge([Pair(side(), side())] * 7, CompareOptions(pairs=7, shown=()))

    assert dot_plot(comparison).splitlines()[0].partition("better ")[2].startswith(f"[{' ' * 20}7{' ' * 20}]")


def test_comment_has_its_hidden_marker(regression: Comparison) -> None:
    assert comment(regression).startswith(COMMENT_MARKER)


def test_gitlab_metrics_are_name_value_lines(regression: Comparison) -> None:
    assert 'tgi_bench_tpot_p50_ms{side="b"} 22' in gitlab_metrics(regression)


def test_files_are_written_only_if_the_environment_names_them(regression: Comparison, tmp_path: Path) -> None:
    assert write_ci(regression, CiEnvironment()) == ""

    summary, output = tmp_path / "summary", tmp_path / "output"
    output.write_text("earlier=1\n")
    assert "::error" in write_ci(regression, CiEnvironment(True, summary, output))
    assert "**Regression.**" in summary.read_text()
    assert output.read_text().startswith("earlier=1\nverdict=regression\n")


def test_comparison_is_written_as_a_report(regression: Comparison, tmp_path: Path) -> None:
    with undrawn_figures():
        paths = write_report(build_comparison_report(regression, ["tgi-bench compare …"]), tmp_path)

    page = paths.html.read_text()
    assert "B is worse than A in TPOT p50" in page
    assert "<b>1</b>" not in page
    assert [path.name for path in paths.figures] == ["forest.png", "forest.svg", "pairs.png", "pairs.svg"]


def test_refused_comparison_is_written_as_a_report(tmp_path: Path) -> None:
    refused = judge([Pair(side(), SideRun("b", {}, "invalid", ("too few requests",)))], OPTIONS)

    text = write_report(build_comparison_report(refused), tmp_path).markdown.read_text()

    assert "**Could not measure.** The runs were not compared." in text
