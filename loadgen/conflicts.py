"""Settings of a load that do not go together."""

from typing import TYPE_CHECKING

from loadgen.modes import FILE_WORKLOADS, GENERATED_WORKLOADS, RATE_MODES, THINKING_MODES, TRACE_WORKLOADS

if TYPE_CHECKING:
    from loadgen.config import BenchConfig

NO_TIME = ("0", "0s", "0ms")


def conflicts(config: "BenchConfig") -> list[tuple[bool, str]]:
    """Every rule that two settings may break together: whether they do, and what to say then."""
    is_trace_workload = config.workload in TRACE_WORKLOADS
    return [
        (config.mode in RATE_MODES and config.rate is None, f"`rate` is needed by mode {config.mode!r}"),
        (
            config.mode not in RATE_MODES and config.rate is not None,
            f"`rate` is {config.rate} but mode {config.mode!r} has no rate; modes with one: {', '.join(RATE_MODES)}",
        ),
        (
            config.burstiness != 1 and config.mode != "gamma",
            f"`burstiness` is {config.burstiness} but only mode 'gamma' has it, not {config.mode!r}",
        ),
        *_workload_conflicts(config),
        *_row_conflicts(config),
        *_length_conflicts(config),
        *(
            (
                not config.stream and getattr(config, name) is not None,
                f"`{name}` is {getattr(config, name)} but `stream` is false: such an answer has no events",
            )
            for name in ("first_event_timeout", "stall_timeout")
        ),
        (
            config.assistant == "real" and config.workload != "multi_turn",
            f"`assistant` is 'real' but workload {config.workload!r} has no turns",
        ),
        (
            config.stop_on_overload and not config.is_open_loop,
            f"`stop_on_overload` is for open loops, and mode {config.mode!r} is closed",
        ),
        (
            config.stop_at_attainment is not None and not config.slo,
            f"`stop_at_attainment` is {config.stop_at_attainment} but there is no `slo` to attain",
        ),
        (
            (config.mode == "stages") != (config.stages is not None),
            f"`stages` is {config.stages!r} but mode is {config.mode!r}; mode 'stages' needs it, no other has it",
        ),
        (
            config.mode == "stages" and (config.duration is not None or config.requests is not None),
            "mode 'stages' ends with its last stage; give neither `duration` nor `requests`",
        ),
        (
            config.mode == "sessions" and (config.requests is not None or config.max_in_flight is not None),
            "mode 'sessions' is ended by `duration` and has no limit in flight; give neither `requests` nor "
            "`max_in_flight`",
        ),
        (config.mode == "burst" and config.requests is None, "`requests` is needed by mode 'burst': how many at once"),
        (
            config.mode == "trace" and not is_trace_workload,
            f"`workload` is {config.workload!r} but mode 'trace' needs one of {', '.join(TRACE_WORKLOADS)}",
        ),
        (
            is_trace_workload and config.trace_file is None,
            f"`trace_file` is needed by workload {config.workload!r}",
        ),
        (
            not is_trace_workload and config.trace_file is not None,
            f"`trace_file` is {config.trace_file!r} but workload {config.workload!r} reads none",
        ),
        (
            config.time_scale != 1 and config.mode != "trace",
            f"`time_scale` is {config.time_scale} but only mode 'trace' keeps arrival times, not {config.mode!r}",
        ),
        (
            config.workload in FILE_WORKLOADS and config.prompts_file is None,
            f"`prompts_file` is needed by workload {config.workload!r}",
        ),
        (
            config.workload not in FILE_WORKLOADS and config.prompts_file is not None,
            f"`prompts_file` is {config.prompts_file!r} but workload {config.workload!r} reads none",
        ),
        (
            config.input_tokens is not None and (is_trace_workload or config.workload in FILE_WORKLOADS),
            f"`input_tokens` is {config.input_tokens} but workload {config.workload!r} has lengths of its own",
        ),
        (
            config.output_tokens is not None and is_trace_workload,
            f"`output_tokens` is {config.output_tokens} but workload {config.workload!r} has lengths of its own",
        ),
        (
            config.max_in_flight is not None and not config.is_open_loop,
            f"`max_in_flight` is {config.max_in_flight} but mode {config.mode!r} is limited by its users",
        ),
        (
            config.think_time not in NO_TIME and config.mode not in THINKING_MODES and config.is_open_loop,
            f"`think_time` is {config.think_time} but only modes {' and '.join(map(repr, THINKING_MODES))} have "
            f"users who think, not {config.mode!r}",
        ),
        (
            config.ramp_up > 0 and config.mode != "closed",
            f"`ramp_up` is {config.ramp_up:g} s but only mode 'closed' has users who arrive, not {config.mode!r}",
        ),
        (
            config.stages_of == "concurrency" and config.mode != "stages",
            f"`stages_of` is 'concurrency' but mode is {config.mode!r}, not 'stages'",
        ),
        (config.duration == 0, "`duration` is 0 but must be above 0"),
        (config.url is not None and config.server is not None, "`url` and `server` exclude each other"),
    ]


def _workload_conflicts(config: "BenchConfig") -> list[tuple[bool, str]]:
    of_prefixes = ("prefix_groups", "prefix_tokens", "prefix_popularity")
    given = next((name for name in of_prefixes if getattr(config, name) is not None), None)
    return [
        (
            given is not None and config.workload != "shared_prefix",
            f"`{given}` belongs to workload 'shared_prefix', not {config.workload!r}",
        ),
        (
            config.turns is not None and config.workload != "multi_turn",
            f"`turns` is {config.turns} but workload {config.workload!r} has no turns",
        ),
        (
            (config.workload == "multi_turn" and config.mode != "sessions" and config.is_open_loop)
            or (config.mode == "sessions" and config.workload != "multi_turn"),
            f"mode {config.mode!r} does not go with workload {config.workload!r}: 'multi_turn' needs mode 'sessions' "
            "or 'closed', and mode 'sessions' needs 'multi_turn'",
        ),
        (
            config.prefix_cache == "warm" and config.workload != "shared_prefix",
            "`prefix_cache` is 'warm' but only workload 'shared_prefix' knows what is shared",
        ),
    ]


def _row_conflicts(config: "BenchConfig") -> list[tuple[bool, str]]:
    """Settings that choose rows of a file where there is none, or none of that kind."""
    belongs = {
        "trace_limit": (*TRACE_WORKLOADS, "sharegpt"),
        "trace_skip": (*TRACE_WORKLOADS, "sharegpt"),
        "trace_loop": TRACE_WORKLOADS,
        "trace_model": ("burstgpt",),
        "trace_log_type": ("burstgpt",),
        "block_tokens": ("mooncake",),
        "min_input_tokens": (*TRACE_WORKLOADS, "sharegpt"),
        "max_input_tokens": (*TRACE_WORKLOADS, "sharegpt"),
        "min_output_tokens": (*TRACE_WORKLOADS, "sharegpt"),
        "max_output_tokens": (*TRACE_WORKLOADS, "sharegpt"),
        "prompt_column": ("prompts",),
        "output_tokens_column": ("prompts",),
    }
    found = [
        (
            getattr(config, name) not in (None, 0, False, ()) and config.workload not in workloads,
            f"`{name}` is {getattr(config, name)!r} but belongs to {', '.join(workloads)}, not to workload "
            f"{config.workload!r}",
        )
        for name, workloads in belongs.items()
    ]
    return [
        *found,
        (
            config.prompts_order != "file" and config.workload not in FILE_WORKLOADS,
            f"`prompts_order` is {config.prompts_order!r} but workload {config.workload!r} reads no prompts",
        ),
        (
            config.trace_loop and config.duration is None and config.requests is None,
            "`trace_loop` has no end: give `duration` or `requests`",
        ),
        *(
            (
                least is not None and most is not None and least > most,
                f"`min_{name}` is {least} but `max_{name}` is {most}",
            )
            for name, least, most in (
                ("input_tokens", config.min_input_tokens, config.max_input_tokens),
                ("output_tokens", config.min_output_tokens, config.max_output_tokens),
            )
        ),
    ]


def _length_conflicts(config: "BenchConfig") -> list[tuple[bool, str]]:
    has_pairs = config.length_pairs is not None
    return [
        (
            has_pairs and config.workload not in GENERATED_WORKLOADS,
            f"`length_pairs` is {config.length_pairs!r} but workload {config.workload!r} has lengths of its own",
        ),
        (
            has_pairs and (config.input_tokens is not None or config.output_tokens is not None),
            "`length_pairs` excludes `input_tokens` and `output_tokens`",
        ),
    ]
