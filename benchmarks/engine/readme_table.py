"""Write README's table of servers from the stored results of benchmarks/engine/over_http.py.

    python -m benchmarks.engine.over_http --models preset:tiny-llama preset:llama-125m \\
        --json benchmarks/results/servers.json
    python -m benchmarks.engine.readme_table
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- servers: written by benchmarks/engine/readme_table.py -->", "<!-- end of servers -->"
OTHERS = {"vllm": "vLLM CPU", "llama.cpp": "llama-server", "continuous": "transformers CB"}

Row = Mapping[str, Any]


def main() -> None:
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}")


def table() -> str:
    """The table in Markdown, of the stored results."""
    return "\n".join(table_of(json.loads((RESULTS / "servers.json").read_bytes())))


def table_of(found: Mapping[str, Any]) -> list[str]:
    """A row for each model and concurrency: our rate, and its ratio to that of each other server."""
    heads = [
        "model, streams",
        "output tokens/s (range)",
        "TTFT p50 ms",
        "TPOT p50 ms",
        *(f"/ {name}" for name in OTHERS.values()),
    ]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for model, streams, rows in _groups(found):
        ours = rows["ours"]
        ratios = [_ratio(ours, rows.get(name)) for name in OTHERS]
        lines.append(
            _line(
                [
                    f"{model}, {streams}",
                    _rate(ours),
                    f"{ours['ttft_ms_p50']:.1f}",
                    f"{ours['tpot_ms_p50']:.2f}",
                    *ratios,
                ]
            )
        )
    return lines


def _groups(found: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Row]]]:
    """Model, concurrency, and the rows by server."""
    for measured in found["measured"]:
        model = measured["model"].removeprefix("preset:")
        for streams in sorted({row["concurrency"] for row in measured["rows"]}):
            yield model, streams, {row["peer"]: row for row in measured["rows"] if row["concurrency"] == streams}


def _rate(row: Row) -> str:
    rates: Sequence[float] = row["rates"]
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"


def _ratio(ours: Row, theirs: Row | None) -> str:
    """The median of the ratios of the rounds; a dash for a server that was not measured."""
    if theirs is None or len(theirs["rates"]) != len(ours["rates"]):
        return "–"
    return f"{statistics.median(a / b for a, b in zip(ours['rates'], theirs['rates'], strict=True)):.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
