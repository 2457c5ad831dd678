"""The file of measured pairs."""

import argparse

from benchmarks.reports.gate_pairs import header
from loadgen.config.bench_config import BenchConfig


def test_the_program_of_the_server_is_named_without_its_directory():
    given = argparse.Namespace(server="'/opt/my tools/serve' --port 8000", state="quiet", factor=None, slices=4)

    assert header(given, BenchConfig(requests=1))["server"] == "serve --port 8000"
