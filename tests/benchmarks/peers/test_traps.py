import json
import threading
from pathlib import Path

from benchmarks.peers import traps
from benchmarks.peers.trap_peers import PEERS, num_requests
from loadgen.selftest import trap_check
from loadgen.selftest.trap_judgement import ToolReport, TrapResult
from loadgen.selftest.trap_rows import TRAPS, TrapLoad


def test_the_table_of_the_page_is_that_of_the_results():
    written = traps.PAGE.read_text().partition(traps.BEGIN)[2].partition(traps.END)[0]

    assert written.strip() == traps.table(json.loads(traps.RESULTS.read_bytes())).strip()


def test_a_row_has_the_number_the_verdict_and_the_skipped_parts(tmp_path: Path):
    path = tmp_path / "traps.json"
    row = {"trap": 8, "passes": True, "values": {"output_tokens_mean": 48.0}}
    traps.store(path, "tgi-bench", "1.0", {**row, "verdict": "invalid", "findings": ["token_count"]})
    traps.store(path, "vllm", "0.32", {**row, "passes": False, "verdict": "valid", "findings": []})

    lines = traps.table(json.loads(path.read_bytes())).splitlines()

    assert lines[0] == "| trap | true | tgi-bench | vllm |"
    assert "| 8 usage counts half more tokens than were streamed | 32 | ✓ 48; invalid: token_count | ✗ 48 |" in lines
    assert "| 7 a role-only event long before the first token | 250 | not run | not run |" in lines
    assert "| **passed**, of the traps that were run | | 1 of 1 | 0 of 1 |" in lines


def test_a_peer_runs_the_honest_loads_that_need_no_flags_of_our_own(monkeypatch):
    report = ToolReport({})
    monkeypatch.setattr(trap_check, "measure_case", lambda case, run: report)

    rows = list(trap_check.check_traps(TRAPS[:3], lambda *_: report, is_peer=True))

    assert [len(row.honest) for row in rows] == [0, 0, 1]


def test_an_honest_load_that_is_wrong_is_named_in_the_table(tmp_path: Path):
    path = tmp_path / "traps.json"
    row = {"trap": 8, "passes": False, "values": {"output_tokens_mean": 48.0}, "verdict": "valid", "findings": []}
    traps.store(path, "vllm", "0.32", {**row, "honest_load": "output_tokens_mean 8 instead of 32 (-75 %)"})

    assert "✗ 48; honest load output_tokens_mean 8 instead of 32 (-75 %) |" in traps.table(
        json.loads(path.read_bytes())
    )


def test_rows_that_run_at_once_each_have_a_result():
    meeting = threading.Barrier(2)

    def check(rows):
        meeting.wait(timeout=30)  # returns only if both rows run at the same time
        return [TrapResult(trap, ToolReport({}), []) for trap in rows]

    found = list(traps.at_once(TRAPS[:4], check, 2))

    assert sorted(result.trap.number for result in found) == [1, 2, 3, 4]


def test_every_peer_has_a_command_for_every_load(tmp_path: Path):
    loads = [trap.deceptive.load for trap in TRAPS]

    for peer in PEERS:
        for load in loads:
            words = peer.command("/env/bin/python", "http://127.0.0.1:1", load, tmp_path)
            assert words[0].startswith("/env/bin/")


def test_a_load_by_time_has_as_many_requests_as_an_honest_server_answers():
    assert num_requests(TrapLoad(duration_s=8.7)) == 80
    assert num_requests(TrapLoad(rate=10.0, duration_s=20.0)) == 200
    assert num_requests(TrapLoad(requests=40)) == 40
