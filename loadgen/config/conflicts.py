"""Settings of a load that contradict each other."""

import math

from loadgen.config.arrival_settings import RATE_MODES, THINKING_MODES
from loadgen.config.bench_settings import BenchSettings
from loadgen.config.target_settings import FIELDS_OF_LOAD
from loadgen.config.workload_settings import FILE_WORKLOADS, TRACE_WORKLOADS
from loadgen.workloads.adapter_mix import parse_share
from loadgen.workloads.departure import parse_departure
from loadgen.workloads.lengths import Lengths

NO_TIME = ("0", "0s", "0ms")


def conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    """Every rule over several settings: whether it is broken, and the message."""
    groups = (
        _mode_conflicts,
        _workload_conflicts,
        _file_conflicts,
        _row_conflicts,
        _length_conflicts,
        _request_conflicts,
        _answer_conflicts,
        _stop_conflicts,
        _departure_conflicts,
        _adapter_conflicts,
        _image_conflicts,
        _server_conflicts,
    )
    return [rule for group in groups for rule in group(config)]


def _mode_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    return [
        (config.mode in RATE_MODES and config.rate is None, f"`rate` is required by mode {config.mode!r}"),
        (
            config.mode not in RATE_MODES and config.rate is not None,
            f"`rate` is {config.rate} but mode {config.mode!r} has no rate; modes with one: {', '.join(RATE_MODES)}",
        ),
        (
            config.burstiness != 1 and config.mode != "gamma",
            f"`burstiness` is {config.burstiness} but mode is {config.mode!r}; only 'gamma' uses it",
        ),
        (
            (config.mode == "stages") != (config.stages is not None),
            f"`stages` is {config.stages!r} but mode is {config.mode!r}; only mode 'stages' has stages",
        ),
        (
            config.mode == "stages" and (config.duration is not None or config.requests is not None),
            "mode 'stages' ends with its last stage; give neither `duration` nor `requests`",
        ),
        (
            config.stages_of == "concurrency" and config.mode != "stages",
            f"`stages_of` is 'concurrency' but mode is {config.mode!r}, not 'stages'",
        ),
        (
            config.mode == "sessions" and (config.requests is not None or config.max_in_flight is not None),
            "mode 'sessions' ends by `duration` and has no in-flight limit; give neither `requests` nor "
            "`max_in_flight`",
        ),
        (
            config.mode == "burst" and config.requests is None,
            "`requests` is required by mode 'burst': the size of the burst",
        ),
        (
            config.max_in_flight is not None and not config.is_open_loop,
            f"`max_in_flight` is {config.max_in_flight} but mode {config.mode!r} is limited by its number of users",
        ),
        (
            config.think_time not in NO_TIME and config.mode not in THINKING_MODES and config.is_open_loop,
            f"`think_time` is {config.think_time} but mode is {config.mode!r}; only "
            f"{' and '.join(map(repr, THINKING_MODES))} have think times",
        ),
        (
            config.ramp_up > 0 and config.mode != "closed",
            f"`ramp_up` is {config.ramp_up:g} s but mode is {config.mode!r}; only 'closed' has a ramp-up",
        ),
    ]


def _file_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    is_trace_workload = config.workload in TRACE_WORKLOADS
    return [
        (
            config.mode == "trace" and not is_trace_workload,
            f"`workload` is {config.workload!r} but mode 'trace' requires one of {', '.join(TRACE_WORKLOADS)}",
        ),
        (
            is_trace_workload and config.trace_file is None,
            f"`trace_file` is required by workload {config.workload!r}",
        ),
        (
            not is_trace_workload and config.trace_file is not None,
            f"`trace_file` is {config.trace_file!r} but workload {config.workload!r} reads no such file",
        ),
        (
            config.time_scale != 1 and config.mode != "trace",
            f"`time_scale` is {config.time_scale} but mode is {config.mode!r}; only 'trace' has arrival times to scale",
        ),
        (
            config.workload in FILE_WORKLOADS and config.prompts_file is None,
            f"`prompts_file` is required by workload {config.workload!r}",
        ),
        (
            config.workload not in FILE_WORKLOADS and config.prompts_file is not None,
            f"`prompts_file` is {config.prompts_file!r} but workload {config.workload!r} reads no such file",
        ),
        (
            config.input_tokens is not None and (is_trace_workload or config.workload in FILE_WORKLOADS),
            f"`input_tokens` is {config.input_tokens} but workload {config.workload!r} defines its own lengths",
        ),
        (
            config.output_tokens is not None and is_trace_workload,
            f"`output_tokens` is {config.output_tokens} but workload {config.workload!r} defines its own lengths",
        ),
    ]


def _answer_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    return [
        *(
            (
                not config.stream and getattr(config, name) is not None,
                f"`{name}` is {getattr(config, name)} but `stream` is false; a blocking answer has no events",
            )
            for name in ("first_event_timeout", "stall_timeout")
        ),
        (
            config.assistant == "real" and config.workload != "multi_turn",
            f"`assistant` is 'real' but workload {config.workload!r} has no turns",
        ),
        *(
            (
                config.structured is None and getattr(config, name) is not None,
                f"`{name}` is {getattr(config, name)} but no request is structured; give --structured SHARE",
            )
            for name in ("structured_tools", "schemas_file")
        ),
    ]


def _stop_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    return [
        (
            config.stop_on_overload and not config.is_open_loop,
            f"`stop_on_overload` needs an open loop, but mode {config.mode!r} is closed",
        ),
        (
            config.stop_at_attainment is not None and not config.slo,
            f"`stop_at_attainment` is {config.stop_at_attainment} but there is no `slo`; give at least one",
        ),
        (
            config.least_duration is not None and config.independent_requests is None,
            f"`least_duration` is {config.least_duration} but has no effect without `independent_requests`",
        ),
        (
            (config.least_duration or 0) > (config.duration or math.inf),
            f"`least_duration` is {config.least_duration} but the longest measurement, `duration`, is "
            f"{config.duration}",
        ),
        (config.duration == 0, "`duration` is 0 but must be above 0"),
    ]


def _departure_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    if config.cancel is None:
        return []
    tokens = parse_departure(config.cancel).tokens
    longest = Lengths.parse(config.output_tokens).longest if config.output_tokens is not None else None
    return [
        (
            not config.stream,
            f"`cancel` is {config.cancel} but `stream` is false; a blocking answer has no tokens to count",
        ),
        (
            longest is not None and longest <= tokens,
            f"`cancel` is {config.cancel} but no answer is longer than {longest} tokens (`output_tokens`)",
        ),
    ]


def _adapter_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    shares = [parse_share(text) for text in config.adapter]
    total, names = sum(share for _, share in shares), [name for name, _ in shares]
    return [
        (total > 1 + 1e-9, f"`adapter` has shares whose sum is {total:g}; it must be at most 1"),
        (len(set(names)) < len(names), f"`adapter` has one name twice: {', '.join(names)}"),
        (bool(shares) and config.adapters is not None, "`adapter` and `adapters` exclude each other"),
        (
            config.adapter_zipf is not None and config.adapters is None,
            f"`adapter_zipf` is {config.adapter_zipf:g} but there are no `adapters`; give --adapters NAMES"
            if config.adapter_zipf is not None
            else "",
        ),
    ]


def _image_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    return [
        *(
            (
                config.images is None and getattr(config, name) is not None,
                f"`{name}` is {getattr(config, name)} but no request has images; give --images COUNT",
            )
            for name in ("image_size", "images_shared")
        ),
        (
            config.images is not None and config.workload == "multi_turn",
            "`images` needs requests of one turn, but workload 'multi_turn' repeats earlier turns",
        ),
    ]


def _server_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    urls = [config.url, *config.replicas]
    return [
        (config.url is not None and config.server is not None, "`url` and `server` exclude each other"),
        (
            config.file_cache != "natural" and config.url is not None,
            f"`file_cache` is {config.file_cache!r} but `url` names a server that already runs; give --server",
        ),
        (
            bool(config.model_files) and config.file_cache == "natural",
            "`model_files` has no effect with `file_cache` 'natural'; give cold or warm",
        ),
        (bool(config.replicas) and config.url is None, f"`replicas` is {list(config.replicas)} but there is no `url`"),
        (len(set(urls)) < len(urls), f"`url` has one address twice: {', '.join(map(str, urls))}"),
        (
            config.balance != "round_robin" and not config.replicas,
            f"`balance` is {config.balance!r} but the load has one server; give --url several times",
        ),
    ]


def _workload_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    of_prefixes = ("prefix_groups", "prefix_tokens", "prefix_popularity")
    prefix_setting = next((name for name in of_prefixes if getattr(config, name) is not None), None)
    return [
        (
            prefix_setting is not None and config.workload != "shared_prefix",
            f"`{prefix_setting}` needs workload 'shared_prefix', not {config.workload!r}",
        ),
        (
            config.turns is not None and config.workload != "multi_turn",
            f"`turns` is {config.turns} but workload {config.workload!r} has no turns",
        ),
        (
            (config.workload == "multi_turn" and config.mode != "sessions" and config.is_open_loop)
            or (config.mode == "sessions" and config.workload != "multi_turn"),
            f"mode {config.mode!r} does not fit workload {config.workload!r}: 'multi_turn' requires mode 'sessions' "
            "or 'closed', and mode 'sessions' requires 'multi_turn'",
        ),
        (
            config.prefix_cache == "warm" and config.workload != "shared_prefix",
            "`prefix_cache` is 'warm' but only workload 'shared_prefix' has known prefixes to send first",
        ),
    ]


def _row_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    """Settings that select rows of a file that the workload does not read."""
    workloads_with = {
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
            f"`{name}` is {getattr(config, name)!r} but workload is {config.workload!r}; it applies to "
            f"{', '.join(workloads)} only",
        )
        for name, workloads in workloads_with.items()
    ]
    return [
        *found,
        (
            config.prompts_order != "file" and config.workload not in FILE_WORKLOADS,
            f"`prompts_order` is {config.prompts_order!r} but workload {config.workload!r} reads no prompts",
        ),
        (
            config.trace_loop and config.duration is None and config.requests is None,
            "`trace_loop` never ends by itself; give `duration` or `requests`",
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


def _length_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    has_pairs = config.length_pairs is not None
    return [
        (
            has_pairs and config.workload in (*TRACE_WORKLOADS, *FILE_WORKLOADS),
            f"`length_pairs` is {config.length_pairs!r} but workload {config.workload!r} defines its own lengths",
        ),
        (
            has_pairs and (config.input_tokens is not None or config.output_tokens is not None),
            "`length_pairs` excludes `input_tokens` and `output_tokens`",
        ),
    ]


def _request_conflicts(config: BenchSettings) -> list[tuple[bool, str]]:
    body = config.extra_body or {}
    parts = [body, *(value for value in body.values() if isinstance(value, dict))]
    own = next((name for part in parts for name in part if name in FIELDS_OF_LOAD), None)
    return [
        (own is not None, f"`extra_body` sets `{own}`, which the load determines"),
        (
            config.api_key is not None and config.api_key_env is not None,
            "`api_key` and `api_key_env` exclude each other",
        ),
        (config.insecure and config.ca_file is not None, "`insecure` and `ca_file` exclude each other"),
    ]
