from loadgen import cli
from reports.gate.history import CommitPoint, append_point


def test_pages_1_history_check_writes_a_page_and_prints_the_changes(tmp_path, capsys):
    table = tmp_path / "history.jsonl"
    for number in range(16):
        level = (20.0 if number < 8 else 23.0) + 0.01 * (number % 3)
        append_point(table, CommitPoint(f"c{number}", "s", "2 × cpu", {"tpot_p50_ms": level}, 5, "2026-01-01"))

    code = cli.main(
        ["history", "check", "--history", str(table), "--metric", "tpot_p50_ms", "--out", str(tmp_path), "--fail"]
    )

    written = capsys.readouterr()
    assert code == 1
    assert "TPOT p50: +15 % (worse) between c7 and c8" in written.out
    page = (tmp_path / "report.html").read_text()
    assert "Became worse" in page
    assert f"report: {tmp_path / 'report.html'}" in written.err
