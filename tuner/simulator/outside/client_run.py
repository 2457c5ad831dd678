"""The client timings of a measured or simulated run, and their statistics for a fit."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loadgen.errors import MeasurementError
from tuner.simulator.simulation import NS_PER_S, PlannedRequest, Simulated, SimulatedLoad

Array = npt.NDArray[np.float64]

# Fewest output tokens of a request whose TPOT is compared.
FEWEST_GAPS = 4
# A number of concurrently decoding requests counts if it lasts for this fraction of the run.
LASTING = 0.05
REQUESTS, MANIFEST = "requests.parquet", "manifest.json"
TIMES = ("t_sent_ns", "t_first_ns", "t_last_ns")
COLUMNS = ("status", *TIMES, "input_tokens", "planned_input_tokens", "output_tokens", "requested_output_tokens")


@dataclass(frozen=True, slots=True)
class ClientRun:
    """The requests of a closed loop with `users`, in the order of sending. Each array [requests].

    name: name of the designed load, equal for its repeats. group: planned length of the prompt. is_answered: false for
    requests that were in flight at the end of the run, whose times do not count.
    """

    name: str
    users: int
    sent_ns: Array
    first_ns: Array
    last_ns: Array
    input_tokens: Array
    output_tokens: Array
    group: Array
    is_answered: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, directory: Path, name: str) -> "ClientRun":
        """Read a run directory. Raises MeasurementError if a request failed or an answer has a wrong length."""
        import pandas as pd

        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        table = pd.read_parquet(directory / REQUESTS, columns=list(COLUMNS))
        failed = table[~table["status"].isin(("ok", "cancelled"))]
        if len(failed):
            raise MeasurementError(
                f"load {name}: {len(failed)} of {len(table)} requests failed ({failed['status'].iloc[0]}); "
                "a cost model needs a load without failed requests"
            )
        table = table.sort_values("t_sent_ns")
        is_ok = table["status"] == "ok"
        wrong = table[is_ok & (table["output_tokens"] != table["requested_output_tokens"])]
        if len(wrong):
            row = wrong.iloc[0]
            raise MeasurementError(
                f"load {name}: {len(wrong)} of {is_ok.sum()} answers have a wrong length, such as "
                f"{row['output_tokens']:.0f} instead of {row['requested_output_tokens']:.0f} tokens; step costs need "
                "answers of forced length"
            )
        planned = table["planned_input_tokens"]
        inputs = table["input_tokens"].fillna(planned + (table["input_tokens"] - planned).median())
        sent, first, last = (table[each].to_numpy(dtype=np.float64) for each in TIMES)
        return cls(
            name,
            int(manifest["config"]["concurrency"]),
            sent,
            first,
            last,
            inputs.to_numpy(dtype=np.float64),
            table["requested_output_tokens"].to_numpy(dtype=np.float64),
            planned.to_numpy(dtype=np.float64),
            is_ok.to_numpy(),
        )

    @property
    def added_tokens(self) -> int:
        """Prompt tokens of a request that were not planned, such as those of a chat template."""
        return max(0, round(float(np.median(self.input_tokens - self.group))))

    @property
    def load(self) -> SimulatedLoad:
        """The load of this run for a simulation."""
        planned = [
            PlannedRequest(int(inputs), int(outputs))
            for inputs, outputs in zip(self.input_tokens, self.output_tokens, strict=True)
        ]
        return SimulatedLoad(planned, users=self.users)

    def with_times_of(self, simulated: Simulated) -> "ClientRun":
        """A copy of this run with the times of a simulation of its load."""
        flights = sorted(simulated.flights, key=lambda flight: flight.id)
        times = np.asarray([(each.sent_ns, each.first_ns, each.end_ns) for each in flights], dtype=np.float64)
        sent, first, last = times.T
        return replace(self, sent_ns=sent, first_ns=first, last_ns=last)

    def statistics(self) -> dict[str, float]:
        """ln of mean TTFT and TPOT in ns by group, of the 90th percentile of TTFT, and of output tokens per second."""
        return {name: math.log(max(value, 1e-9)) for name, value in self._values()}

    def _values(self) -> Iterator[tuple[str, float]]:
        is_in = self.is_answered
        sent, first, last = self.sent_ns[is_in], self.first_ns[is_in], self.last_ns[is_in]
        ttft, gaps, groups = first - sent, self.output_tokens[is_in] - 1, self.group[is_in]
        yield "throughput", float((gaps + 1).sum()) / float(last.max() - sent.min()) * NS_PER_S
        for group in np.unique(groups):
            yield f"ttft_{group:g}", float(ttft[groups == group].mean())
        if self.users > 1:
            yield "ttft_p90", float(np.quantile(ttft, 0.9))
        is_long = gaps >= FEWEST_GAPS
        for group in np.unique(groups[is_long]):
            of = is_long & (groups == group)
            yield f"tpot_{group:g}", float(((last - first)[of] / gaps[of]).mean())

    @property
    def decoding_at_once(self) -> int:
        """The largest number of concurrently decoding requests that lasts for `LASTING` of the run."""
        first, last = self.first_ns[self.is_answered], self.last_ns[self.is_answered]
        moments = [(at, 1) for at in first] + [(at, -1) for at in last]
        lasted: dict[int, float] = {}
        count, before = 0, 0.0
        for at, change in sorted(moments):
            lasted[count] = lasted.get(count, 0.0) + at - before
            count, before = count + change, at
        least = LASTING * float(last.max() - first.min())
        return max((number for number, ns in lasted.items() if number and ns >= least), default=1)


def residuals_of(measured: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, float]:
    """ln(predicted / measured) of each statistic."""
    return {name: predicted[name] - value for name, value in measured.items()}
