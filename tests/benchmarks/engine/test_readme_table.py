"""README's tables of servers."""

import pytest

from benchmarks.engine import readme_table


def row(peer: str, *rates: float) -> dict[str, object]:
    return {"peer": peer, "concurrency": 8, "rates": list(rates), "ttft_ms_p50": 12.34, "tpot_ms_p50": 1.234}


def found(*rows: dict[str, object]) -> dict[str, object]:
    return {"measured": [{"model": "preset:tiny-llama", "rows": list(rows)}]}


def test_a_row_has_the_median_of_the_ratios_of_the_rounds() -> None:
    lines = readme_table.table_of(found(row("vllm", 50, 50, 100), row("ours", 100, 200, 1500)))

    assert lines[2] == "| tiny-llama, 8 | 200 (100–1,500) | 12.3 | 1.23 | 4.00 | – | – |"


@pytest.mark.parametrize("name", readme_table.TABLES)
def test_readme_has_the_stored_results(name: str) -> None:
    assert readme_table.written(readme_table.README.read_text(), name) == readme_table.table(name) != ""
