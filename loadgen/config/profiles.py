"""Named loads: settings that model a use of a server. A profile sets defaults; flags and files override it.

Lengths are in tokens: round numbers in the range that operators report for such uses. A trace of your own traffic is
more accurate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ProfileName = Literal["chat", "rag", "code", "summarize", "bloom-k6"]
# Input and output tokens of the seven requests of TGI's first k6 script (k6/load_test.js); the inputs are estimates.
BLOOM_K6_LENGTHS = Path(__file__).parent / "bloom_k6_lengths.txt"


@dataclass(frozen=True, slots=True)
class Profile:
    """`models`: the use of a server that the settings model."""

    models: str
    settings: Mapping[str, Any]


PROFILES: dict[str, Profile] = {
    "chat": Profile(
        "conversations of 2 to 6 questions, each prompt with all turns before it, and pauses to read and to type",
        {
            "workload": "multi_turn",
            "turns": "uniform:2,6",
            "input_tokens": "lognormal:60,0.8",
            "output_tokens": "lognormal:200,0.7",
            "think_time": "exponential:5s",
        },
    ),
    "rag": Profile(
        "questions over retrieved passages: one instruction that all prompts share, long new passages, short answers",
        {
            "workload": "shared_prefix",
            "prefix_groups": 1,
            "prefix_tokens": 200,
            "input_tokens": "lognormal:2500,0.4",
            "output_tokens": "lognormal:150,0.6",
        },
    ),
    "code": Profile(
        "completions in an editor: many open files of which a few are used most, short answers, a pause while typing",
        {
            "workload": "shared_prefix",
            "prefix_groups": 32,
            "prefix_tokens": 800,
            "prefix_popularity": "zipf",
            "input_tokens": "lognormal:300,0.6",
            "output_tokens": "lognormal:24,0.8",
            "think_time": "uniform:1s,3s",
        },
    ),
    "summarize": Profile(
        "long documents that share nothing, and answers of a few paragraphs",
        {"input_tokens": "lognormal:4000,0.5", "output_tokens": "lognormal:250,0.4"},
    ),
    "bloom-k6": Profile(
        "the load test of TGI's first release: 50, then 100 users in 4 minutes, blocking calls of seven lengths, a "
        "pause of 1 s",
        {
            "mode": "stages",
            "stages_of": "concurrency",
            "stages": "1m:50,2m:100,1m:0",
            "think_time": "1s",
            "stream": False,
            "length_control": "capped",
            "length_pairs": str(BLOOM_K6_LENGTHS),
        },
    ),
}
DESCRIPTION = "Named load, whose settings other flags override. " + " ".join(
    f"`{name}`: {profile.models}." for name, profile in PROFILES.items()
)


def with_profile(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of their profile, which they override. An unknown profile adds none."""
    profile = PROFILES.get(str(values.get("profile")))
    return {**(profile.settings if profile else {}), **values}
