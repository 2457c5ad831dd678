"""The traps as a table: for each a deceiving server, an honest load, a quantity with its true value, and a finding.

The server's speed is known, so true values are arithmetic. A load is described without any tool's flags.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from loadgen.errors import UsageError
from loadgen.selftest.trap_behaviour import BATCH, STALL_S, Behaviour


class Companion(StrEnum):
    """A process in addition to the server and the tool under test."""

    OTHER_CLIENT = "other_client"
    CLOCK_STEP = "clock_step"
    STARVED = "starved"


@dataclass(frozen=True, slots=True)
class TrapLoad:
    """A closed loop of `users`, or an open loop with constant arrivals at `rate`; ends by time or by requests.

    `runs` on one server; the last one counts. `own_flags` are for this product's tool alone.
    """

    users: int = BATCH
    rate: float | None = None
    duration_s: float = 10.0
    requests: int | None = None
    input_tokens: int = 100
    output_tokens: int = 32
    runs: int = 1
    own_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrapCase:
    """One load on one server. `true` are values by quantity; None: no single number is true."""

    behaviour: Behaviour
    load: TrapLoad
    true: dict[str, float | None]
    companion: Companion | None = None

    def true_in(self, window_s: float | None) -> dict[str, float | None]:
        """The true values in a window of this length; None: of the length of the load.

        A request that arrives in a stall waits for its rest, half of it on average; one that is in its prefill when the
        stall begins waits for all of it.
        """
        if self.behaviour.stalls_after_s is None:
            return self.true
        prefill_s = self.behaviour.prefill_s
        waited_s = (STALL_S / 2 + prefill_s) * STALL_S / (window_s or self.load.duration_s)
        return {**self.true, "ttft_mean_ms": 1e3 * (prefill_s + waited_s)}


@dataclass(frozen=True, slots=True)
class Trap:
    """One deception, and an honest load that resembles it. `findings` are checks that count as the right reason."""

    number: int
    name: str
    deceptive: TrapCase
    honest: TrapCase
    findings: tuple[str, ...] = ()


def speeds(behaviour: Behaviour, load: TrapLoad) -> dict[str, float]:
    """The true values of an honest run of a load, by quantity."""
    tokens = behaviour.answer_tokens(load.output_tokens)
    first_s = behaviour.first_s(load.input_tokens, 0)
    e2e_s = first_s + (tokens - 1) * behaviour.gap_s
    per_s = load.rate if load.rate is not None else load.users / e2e_s
    return {
        "ttft_mean_ms": 1e3 * first_s,
        "tpot_mean_ms": 1e3 * behaviour.gap_s,
        "itl_mean_ms": 1e3 * behaviour.gap_s,
        "e2e_mean_ms": 1e3 * e2e_s,
        "requests_per_s": per_s,
        "output_tokens_per_s": tokens * per_s,
        "output_tokens_mean": tokens,
        "input_tokens_mean": behaviour.prompt_tokens(load.input_tokens),
        "failed": 0,
    }


def case(
    behaviour: Behaviour,
    load: TrapLoad,
    *quantities: str,
    companion: Companion | None = None,
    **true: float | None,
) -> TrapCase:
    """A case with the named quantities of an honest server of this behaviour, and values that are given."""
    known = speeds(behaviour, load)
    return TrapCase(behaviour, load, {**{name: known[name] for name in quantities}, **true}, companion)


PLAIN = Behaviour()
SHORT = TrapLoad(duration_s=8.0)
# A part of these 40 requests fails on purpose; their ends are counted.
COUNTED = TrapLoad(requests=40)
LATENCIES = ("ttft_mean_ms", "tpot_mean_ms", "e2e_mean_ms")
EVERY = (*LATENCIES, "itl_mean_ms", "requests_per_s", "output_tokens_per_s", "output_tokens_mean", "input_tokens_mean")

CACHING = Behaviour(prefill_s=0.05, prefill_s_per_token=0.002, cache_block_tokens=16)
OPEN = TrapLoad(rate=10.0, duration_s=20.0)
LONG_ANSWERS = TrapLoad(output_tokens=101, duration_s=12.0)
SHARED = Behaviour(shares_speed=True)
FOUR_SLOTS = Behaviour(slots=4)
TEMPLATE = Behaviour(template_tokens=8)

HONEST = case(PLAIN, TrapLoad(duration_s=20.0), *EVERY, "failed")

TRAPS = (
    Trap(
        1,
        "the prefix cache is kept between runs",
        case(CACHING, TrapLoad(duration_s=8.0, runs=2), "ttft_mean_ms"),
        TrapCase(
            CACHING,
            TrapLoad(
                duration_s=8.0,
                input_tokens=36,
                own_flags=("--workload", "shared_prefix", "--prefix-tokens", "64", "--prefix-groups", "2"),
            ),
            {},
        ),
        ("prompts_known",),
    ),
    Trap(
        2,
        "the connection is dropped after the send",
        case(Behaviour(drop_every=4), COUNTED, failed=10),
        case(
            Behaviour(idle_close_s=0.5),
            TrapLoad(duration_s=8.0, own_flags=("--think-time", "1s")),
            *LATENCIES,
            "failed",
        ),
    ),
    Trap(
        3,
        "the speed rises during 20 s",
        case(Behaviour(ramp_s=20.0), TrapLoad(duration_s=33.0), "output_tokens_per_s"),
        case(PLAIN, TrapLoad(duration_s=10.0), "output_tokens_per_s"),
        ("steady_state", "not_stationary"),
    ),
    Trap(
        4,
        "the speed halves in mid-run",
        case(Behaviour(halves_after_s=9.0), TrapLoad(duration_s=16.0), output_tokens_per_s=None),
        case(PLAIN, TrapLoad(duration_s=16.0), "output_tokens_per_s"),
        ("steady_state", "not_stationary"),
    ),
    Trap(
        5,
        "the whole server stalls for 3 s under an open loop",
        case(Behaviour(stalls_after_s=9.0), OPEN, ttft_mean_ms=512.5),
        case(PLAIN, OPEN, *LATENCIES),
        ("stall",),
    ),
    Trap(
        6,
        "several tokens in an event",
        case(Behaviour(event_tokens=4), SHORT, "tpot_mean_ms"),
        case(Behaviour(reports_each_usage=True), SHORT, *LATENCIES),
    ),
    Trap(
        7,
        "a role-only event long before the first token",
        case(Behaviour(role_at_once=True), SHORT, "ttft_mean_ms"),
        case(Behaviour(role_in_first_token=True), SHORT, *LATENCIES),
    ),
    Trap(
        8,
        "usage counts half more tokens than were streamed",
        case(Behaviour(usage_factor=1.5), SHORT, "output_tokens_mean"),
        case(Behaviour(event_tokens=4), SHORT, "output_tokens_mean"),
        ("token_count",),
    ),
    Trap(
        9,
        "answers are half as long as asked",
        case(Behaviour(length_factor=0.5), SHORT, "output_tokens_mean"),
        case(PLAIN, SHORT, "output_tokens_mean"),
        ("answer_length",),
    ),
    Trap(
        10,
        "fast 429 answers beside slow successes",
        case(Behaviour(refuse_every=2), TrapLoad(duration_s=12.0), "output_tokens_per_s", "e2e_mean_ms"),
        case(Behaviour(gap_s=0.03), TrapLoad(duration_s=12.0), "output_tokens_per_s", "e2e_mean_ms"),
    ),
    Trap(
        11,
        "errors inside a stream of status 200",
        case(Behaviour(error_every=4), COUNTED, failed=10),
        case(PLAIN, COUNTED, "failed"),
    ),
    Trap(
        12,
        "a stream ends without a finish reason",
        case(Behaviour(unfinished_every=4), COUNTED, failed=10),
        case(Behaviour(sends_done=False), COUNTED, "failed"),
        ("finish_reason",),
    ),
    Trap(
        13,
        "a proxy releases tokens once a second",
        case(Behaviour(release_s=1.0), LONG_ANSWERS, "ttft_mean_ms"),
        case(Behaviour(events_at_once=4), LONG_ANSWERS, "ttft_mean_ms", "tpot_mean_ms"),
        ("bursts",),
    ),
    Trap(
        14,
        "the backlog grows",
        case(FOUR_SLOTS, TrapLoad(rate=8.0, duration_s=15.0), ttft_mean_ms=None),
        case(FOUR_SLOTS, TrapLoad(rate=3.0, duration_s=15.0), *LATENCIES),
        ("overloaded",),
    ),
    Trap(
        15,
        "long answers at the window's end",
        case(SHARED, TrapLoad(output_tokens=150, duration_s=15.0), "tpot_mean_ms"),
        case(SHARED, TrapLoad(duration_s=15.0), "tpot_mean_ms"),
    ),
    Trap(
        16,
        "the wall clock steps by 5 s",
        case(PLAIN, TrapLoad(duration_s=12.0), "e2e_mean_ms", companion=Companion.CLOCK_STEP),
        case(PLAIN, TrapLoad(duration_s=12.0), "e2e_mean_ms"),
    ),
    Trap(
        17,
        "another client loads the server",
        case(SHARED, SHORT, "tpot_mean_ms", companion=Companion.OTHER_CLIENT),
        case(SHARED, SHORT, "tpot_mean_ms"),
        ("request_count",),
    ),
    Trap(
        18,
        "prompts have half more tokens than asked",
        case(Behaviour(prompt_factor=1.5), SHORT, "input_tokens_mean"),
        case(TEMPLATE, SHORT, "input_tokens_mean"),
        ("prompt_length",),
    ),
    Trap(
        19,
        "the generator has half of its CPU time",
        case(PLAIN, TrapLoad(duration_s=12.0), "ttft_mean_ms", companion=Companion.STARVED),
        case(PLAIN, TrapLoad(duration_s=12.0), "ttft_mean_ms"),
        ("cpu", "loop_lag", "schedule_lag", "starved"),
    ),
    Trap(
        20,
        "the server restarts in mid-run",
        case(Behaviour(restarts_after_s=6.0), TrapLoad(duration_s=12.0), output_tokens_per_s=None),
        case(PLAIN, TrapLoad(duration_s=12.0), "output_tokens_per_s"),
        ("server_identity",),
    ),
    Trap(
        21,
        "keep-alive comments between tokens",
        case(Behaviour(sends_comments=True), SHORT, "ttft_mean_ms"),
        case(PLAIN, SHORT, "ttft_mean_ms"),
    ),
    Trap(
        22,
        "reasoning and tool calls before the text",
        case(Behaviour(reasoning_tokens=8, tool_tokens=4), SHORT, "ttft_mean_ms"),
        case(PLAIN, SHORT, "ttft_mean_ms"),
    ),
)
HONEST_ROW = Trap(0, "no deception", HONEST, HONEST)


def select_traps(numbers: Iterable[int] | None) -> tuple[Trap, ...]:
    """The traps of these numbers, all of them and row 0 without numbers. Raises UsageError."""
    known = {trap.number: trap for trap in (HONEST_ROW, *TRAPS)}
    if numbers is None:
        return tuple(known.values())
    wanted = list(numbers)
    unknown = [number for number in wanted if number not in known]
    if unknown:
        raise UsageError(f"`traps` has {unknown[0]}, but the traps are 0 to {max(known)}")
    return tuple(known[number] for number in wanted)
