"""Write README's tables of servers from the stored results of benchmarks/engine/over_http.py.

    python -m benchmarks.engine.over_http --models preset:tiny-llama preset:llama-125m \\
        --json benchmarks/results/servers.json
    python -m benchmarks.engine.readme_table

`servers.json` is of a processor with AVX-512 BF16, `servers_avx2.json` of one with AVX2 only.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ("servers", "servers_avx2")
"""Files of results; each has a table between two comments."""
OTHERS = {"vllm": "vLLM CPU", "llama.cpp": "llama-server", "continuous": "transformers CB"}

Row = Mapping[str, Any]


def main() -> None:
    for name in TABLES:
        text = README.read_text()
        README.write_text(text.replace(written(text, name), table(name)))


def written(text: str, name: str) -> str:
    """The table of a file of results as README has it."""
    begin, end = f"<!-- {name}: written by benchmarks/engine/readme_table.py -->", f"<!-- end of {name} -->"
    return text.partition(begin)[2].partition(end)[0].strip()


def table(name: str) -> str:
    """The table in Markdown, of the stored results."""
    return "\n".join(table_of(json.loads((RESULTS / f"{name}.json").read_bytes())))


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
