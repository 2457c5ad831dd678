"""The page of a benchmark, with the layout of the reports."""

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from reference_server.benchmark.results import BenchmarkResult
from reports.pages.step_page import build_step_report
from reports.renderers.write import write_page


def write_result_page(result: BenchmarkResult, path: Path) -> None:
    """Write one self-contained HTML file."""
    report = build_step_report(
        result.model,
        pd.DataFrame([asdict(each) for each in result.latencies()]),
        pd.DataFrame([asdict(each) for each in result.throughputs()]),
        facts=(
            ("Load", tuple((name.replace("_", " "), str(value)) for name, value in result.settings.items())),
            ("Model server", tuple((name.replace("_", " "), str(value)) for name, value in result.shard.items())),
            ("Versions", tuple(result.versions.items())),
        ),
    )
    write_page(report, path)
