"""The rows of adapters: the base model first, then by requests, and by name where these are equal."""

from types import SimpleNamespace

import pandas as pd

from reports.metrics.requests.per_adapter import adapters_summary


def test_adapters_are_ordered_by_requests_and_then_by_name() -> None:
    names = ["b", "d", "a", "d", None, "c", "a10", "b"]
    columns = {"status": "ok", "output_tokens": 3, "ttft_s": 0.1, "tpot_s": 0.01, "e2e_s": 0.2}

    rows = adapters_summary(SimpleNamespace(population=pd.DataFrame({"adapter": names, **columns})))

    assert [row["adapter"] for row in rows] == [None, "b", "d", "a", "a10", "c"]
    assert [row["requests"] for row in rows] == [1, 2, 2, 1, 1, 1]


def test_without_adapters_there_are_no_rows() -> None:
    assert adapters_summary(SimpleNamespace(population=pd.DataFrame({"adapter": [None, None]}))) == []
