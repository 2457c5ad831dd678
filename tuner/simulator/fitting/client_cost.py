"""The time of a request outside model steps: between client and queue, and to tokenize its prompt.

Both are computed from a measured run. The first is the mean latency at the client minus the mean time in the server.
The second is the server's validation time divided by the number of prompt tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

NS_PER_S = 1_000_000_000
# The server's histograms whose sum is the time of a request in the server.
SERVER_TIMES = (
    "tgi_request_validation_duration_sum",
    "tgi_request_queue_duration_sum",
    "tgi_request_inference_duration_sum",
)
REQUEST_COUNT, PROMPT_TOKENS = "tgi_request_duration_count", "tgi_request_input_length_sum"


@dataclass(frozen=True, slots=True)
class ClientCost:
    """ns of a request between client and queue, and ns of a prompt token on a validation worker; 0 if unknown.

    added_tokens: tokens of the chat template and special tokens, which the length of a load does not include.
    """

    client_ns: int = 0
    tokenize_ns: int = 0
    added_tokens: int = 0

    @property
    def is_known(self) -> bool:
        return bool(self.client_ns or self.tokenize_ns)

    @classmethod
    def mean(cls, each: Sequence["ClientCost"]) -> "ClientCost":
        """The mean of the known costs."""
        known = [cost for cost in each if cost.is_known]
        if not known:
            return cls()
        return cls(round(fmean(cost.client_ns for cost in known)), round(fmean(cost.tokenize_ns for cost in known)))


NO_COST = ClientCost()


def client_cost_of(run_directory: Path) -> ClientCost:
    """The costs of a measured run; `NO_COST` without the server's metrics or without successful requests."""
    import pandas as pd

    requests, metrics = run_directory / "requests.parquet", run_directory / "server_metrics.parquet"
    if not requests.exists() or not metrics.exists():
        return NO_COST
    sums = pd.read_parquet(metrics, filters=[("name", "in", [*SERVER_TIMES, REQUEST_COUNT, PROMPT_TOKENS])])
    samples = sums.groupby("name")["value"]
    grown = (samples.last() - samples.first()).to_dict()
    count, tokens = grown.get(REQUEST_COUNT, 0.0), grown.get(PROMPT_TOKENS, 0.0)
    answered = pd.read_parquet(requests, columns=["status", "t_sent_ns", "t_end_ns"])
    answered = answered[answered["status"] == "ok"]
    if count <= 0 or tokens <= 0 or not len(answered):
        return NO_COST
    waited_ns = float(np.mean(answered["t_end_ns"] - answered["t_sent_ns"]))
    served_ns = sum(grown.get(name, 0.0) for name in SERVER_TIMES) / count * NS_PER_S
    tokenize_ns = grown[SERVER_TIMES[0]] / tokens * NS_PER_S
    return ClientCost(max(0, round(waited_ns - served_ns)), round(tokenize_ns))
