"""Settings of the times of requests: mode, users or rate, and the phases of a load."""

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field, field_validator, model_validator

from loadgen.config.durations import parse_stages
from loadgen.config.parsing import Brief, Metavar
from loadgen.config.profiles import DESCRIPTION as PROFILE_DESCRIPTION
from loadgen.config.profiles import ProfileName, with_profile
from loadgen.config.setting_types import Seconds, accepted_by, as_text
from loadgen.workloads.departure import EXAMPLE as DEPARTURE_EXAMPLE
from loadgen.workloads.departure import parse_departure
from loadgen.workloads.think_time import EXAMPLES as THINK_TIME_EXAMPLES
from loadgen.workloads.think_time import parse_think_time
from reports.run_store import is_open_loop

Mode = Literal["closed", "constant", "poisson", "gamma", "burst", "stages", "sessions", "trace"]

RATE_MODES = ("constant", "poisson", "gamma", "sessions")
THINKING_MODES = ("closed", "sessions")

# Documentation lists them as modes, but each is a command of its own.
COMMAND_MODES = ("sweep", "search")

DEFAULT_DURATION_S = 30.0
DEFAULT_WARMUP_S = 3.0
DEFAULT_DRAIN_S = 30.0
PROFILE_BRIEF = Brief(
    f"Named load, whose settings other flags override: {', '.join(get_args(ProfileName))}. --help-all describes them."
)


DepartureText = Annotated[str, accepted_by(parse_departure), Metavar("SHARE@TOKENS")]
ThinkTimeText = Annotated[str, BeforeValidator(as_text), accepted_by(parse_think_time), Metavar("TIME|DIST")]


class ArrivalSettings(BaseModel):
    """When requests start, and how long the load runs."""

    profile: Annotated[ProfileName, PROFILE_BRIEF] | None = Field(None, description=PROFILE_DESCRIPTION)
    mode: Mode = Field(
        "closed",
        description="When requests start. `closed`: each of --concurrency users sends its next request after the "
        "answer. `constant`, `poisson`, `gamma`: at --rate, whether or not the server keeps up. `burst`: all at "
        "once. `stages`: at a rate that follows --stages. `sessions`: conversations start at --rate. `trace`: at "
        "the times of --trace-file.",
    )
    concurrency: int = Field(
        8, ge=1, le=100_000, description="Number of users of a closed loop: requests at the same time."
    )
    rate: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="Requests per second of an open loop; in mode sessions, sessions per second.",
    )
    stages: Annotated[str, accepted_by(parse_stages), Metavar("STAGES")] | None = Field(
        None,
        description="Load over time, as DURATION:TARGET,…: 30s:8,1m:8,10s:0. The load starts at 0 and changes "
        "linearly to each target, in the unit of --stages-of.",
    )
    stages_of: Literal["rate", "concurrency"] = Field(
        "rate", description="Unit of the targets of --stages: requests per second, or users of a closed loop."
    )
    ramp_up: Seconds = Field(0.0, description="Time in which the users of mode closed start, at equal intervals.")
    burstiness: float = Field(
        1.0,
        gt=0,
        le=1_000,
        description="Shape of gamma arrivals: 1 is Poisson; lower values have more bursts, higher ones are more "
        "regular.",
    )
    duration: Seconds | None = Field(
        None,
        description="Length of the measurement, after the warm-up, such as 20s or 2m. Default 30s; none if "
        "--requests or a trace ends the run.",
    )
    requests: int | None = Field(
        None, ge=1, le=10_000_000, description="Measure the first N requests after the warm-up."
    )
    warmup: Seconds | None = Field(
        None,
        description="Time of load before the measurement, whose requests are in no metric. Default 3s; 0 for "
        "--requests and traces.",
    )
    drain: Seconds | None = Field(
        None,
        description="Longest time that the load continues after the measurement, until the last measured request "
        "has ended. Default 30s; --timeout if --requests or a trace ends the measurement.",
    )
    think_time: ThinkTimeText = Field(
        "0",
        description="Pause between an answer and the next request, in closed loops and sessions: a time or a "
        f"distribution, as in {THINK_TIME_EXAMPLES}.",
    )
    cancel: DepartureText | None = Field(
        None,
        description="Clients that disconnect: fraction of the requests, and the number of tokens after which they "
        f"close their connection, as in {DEPARTURE_EXAMPLE} or 20%@16. Their latencies are in no metric.",
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Largest number of requests of an open loop at the same time. Further ones wait in the client; "
        "the wait is part of their latency. Default no limit.",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _refuse_commands(cls, value: object) -> object:
        if value in COMMAND_MODES:
            raise ValueError(f"{value!r} is a command of its own: tgi-bench {value}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _add_profile(cls, values: object) -> object:
        return with_profile(values) if isinstance(values, dict) else values

    @property
    def is_open_loop(self) -> bool:
        return is_open_loop(self.mode, self.stages_of)
