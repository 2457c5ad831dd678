"""Parses durations, `20s` or `1.5m`, and stages made of them."""

import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)")
_UNITS_S = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3_600.0}


def parse_duration(value: object) -> object:
    """Seconds of a text such as `20s`, `1.5m` or `500ms`. Other types are returned unchanged, for pydantic.

    >>> parse_duration("2m")
    120.0
    """
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError("not a duration; write seconds or a number with ms, s, m or h, as in 20s")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_stages(text: str) -> tuple[tuple[float, float], ...]:
    """(seconds, target) of a text such as `30s:8,1m:8,10s:0`. Raises ValueError.

    >>> parse_stages("30s:8,1m:0")
    ((30.0, 8.0), (60.0, 0.0))
    """
    stages = []
    for stage in text.split(","):
        length, _, target = stage.partition(":")
        length_s, rate = parse_duration(length), float(target or "nan")
        if not isinstance(length_s, float) or length_s <= 0 or not 0 <= rate <= 1_000_000:
            raise ValueError(f"{stage!r} is not a stage; write a duration and a rate, as in 30s:8")
        stages.append((length_s, rate))
    if not any(rate for _, rate in stages):
        raise ValueError("every stage has a rate of 0")
    return tuple(stages)
