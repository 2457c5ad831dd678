"""Settings of limits: of each request, of the run, and of its metrics."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from loadgen.config.objectives import EXAMPLE as SLO_EXAMPLE
from loadgen.config.objectives import WIDTH_EXAMPLE, parse_objective, parse_width
from loadgen.config.parsing import Metavar
from loadgen.config.setting_types import Seconds, as_tuple
from loadgen.http.response_reader import MAX_RESPONSE_BYTES
from loadgen.http.sse import MAX_LINE_BYTES


def _check_objective(value: str) -> str:
    parse_objective(value)
    return value.strip()


def _check_width(value: str) -> str:
    parse_width(value)
    return value.strip()


ObjectiveText = Annotated[str, AfterValidator(_check_objective), Metavar("OBJECTIVE")]
WidthText = Annotated[str, AfterValidator(_check_width), Metavar("WIDTH")]


class LimitSettings(BaseModel):
    """When a request fails, when the run ends early, and the objectives."""

    timeout: Seconds = Field(600.0, gt=0, description="Time limit of one request.")
    first_event_timeout: Seconds | None = Field(
        None,
        gt=0,
        description="Longest time from the request's last byte to the first token of a stream; a later request "
        "fails. Default no limit.",
    )
    stall_timeout: Seconds | None = Field(
        None,
        gt=0,
        description="Longest time between two tokens of a stream; a slower request fails. Comments are not tokens. "
        "Default no limit.",
    )
    max_line_bytes: int = Field(
        MAX_LINE_BYTES, ge=1_024, le=2**30, description="Longest accepted line of a stream, in bytes."
    )
    max_response_bytes: int = Field(
        MAX_RESPONSE_BYTES, ge=1_024, le=2**32, description="Largest accepted response, in bytes."
    )
    max_errors: int | None = Field(
        None, ge=1, description="End the run after this number of failed requests. Default no limit."
    )
    max_error_share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="End the run when more than this fraction of 50 successive requests failed, in the order of their "
        "sends: a refusal ends before the answers of other requests.",
    )
    converge: Annotated[tuple[WidthText, ...], BeforeValidator(as_tuple)] = Field(
        (),
        description="End the run when the half-width of a metric's 95 % interval is at most this percentage of its "
        f'value, as in "{WIDTH_EXAMPLE}"; repeatable, all must hold. Checked after --converge-requests, then twice '
        "per doubling.",
    )
    converge_requests: int = Field(100, ge=30, description="Measured requests before the first check of --converge.")
    stop_on_overload: bool = Field(
        False, description="End an open loop when TTFT and requests in flight both keep growing."
    )
    stop_at_attainment: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="End the run when the attainment of every --slo is significantly above or below this fraction.",
    )
    independent_requests: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="End the run, after --least-duration, when its requests give as much information as this number of "
        "independent requests; requests that wait in one queue depend on each other. --duration is then the longest "
        "measurement.",
    )
    least_duration: Seconds | None = Field(None, description="Shortest measurement with --independent-requests.")
    unhealthy_probes: int = Field(
        5,
        ge=0,
        le=1_000,
        description="End the run when the server's health route fails this many times in a row; 0: never.",
    )

    slo: Annotated[tuple[ObjectiveText, ...], BeforeValidator(as_tuple)] = Field(
        (),
        description=f'Objective of each request, such as "{SLO_EXAMPLE}"; repeatable. Adds goodput_rps '
        "and slo_attainment.",
    )
    stop_when_missed: Annotated[tuple[ObjectiveText, ...], BeforeValidator(as_tuple)] = Field(
        (),
        description="End the run when a metric misses a limit significantly (99 % bound, after a quarter of the "
        'duration), as in "ttft_p95_ms < 500"; repeatable, one missed limit is enough.',
    )
    cost_per_hour: float | None = Field(
        None, gt=0, description="Price of the server per hour, in any currency. Adds cost_per_mtok."
    )
