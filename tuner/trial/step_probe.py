"""Requests before the load of a trial, so that its step trace determines every term of the step law.

Most steps of a closed loop have nearly equal numbers of rows and keys. From these alone, the time of a step cannot be
divided into its constant, its rows and its keys, so loads of other sizes could not be predicted.
"""

import random
from collections.abc import Mapping
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import LoadgenError
from loadgen.progress import ProgressDisplay
from loadgen.target.target import Target
from tuner.trial.request_bursts import DECODED, FIRST_TOKEN, ProbeBurst, send_bursts

CONTEXTS = (32, 256, 1024)
# Largest number of prompt tokens in a burst of several requests.
BURST_TOKENS = 4096
# Decode batches have up to this multiple of the users of a closed loop; those of an open loop have up to `OPEN_ROWS`.
BEYOND_USERS, OPEN_ROWS = 2, 32
REPEATS = 3
PROBE_S = 3.0


def probe_steps(target: Target, load: BenchConfig, settings: Mapping[str, Any], progress: ProgressDisplay) -> None:
    """Send the bursts of a probe and wait for their answers. A probe that fails does not fail the trial.

    A server with drafts gets none, because the acceptance of drafts is a fact of the load.
    """
    if settings.get("speculate"):
        return
    users = OPEN_ROWS if load.is_open_loop else BEYOND_USERS * load.users
    try:
        info = target.info()
        longest = min(int(info["max_input_tokens"]), int(info["max_total_tokens"]) - DECODED)
        most = min(users, int(info["max_concurrent_requests"]))
        send_bursts(target, probe_bursts(most, longest), PROBE_S)
    except (LoadgenError, KeyError) as error:
        progress.show(f"  the step probe failed: {error}")


def probe_bursts(most_rows: int, longest_input: int, seed: int = 0) -> list[ProbeBurst]:
    """Decode batches of 1, 2, 4, ... rows at short and long contexts, and single prompts, each `REPEATS` times.

    The extremes come first, because a slow server has no time for all.

    >>> [(burst.count, burst.input_tokens) for burst in probe_bursts(2, 64)[:4]]
    [(1, 32), (2, 64), (1, 64), (2, 32)]
    """
    contexts = sorted({max(1, min(context, longest_input)) for context in CONTEXTS})
    sizes = sorted({most_rows, *(1 << power for power in range(most_rows.bit_length()))})
    decodes = {
        rows: [context for context in contexts if rows == 1 or rows * context <= BURST_TOKENS] or contexts[:1]
        for rows in sizes
    }
    few, many = sizes[0], sizes[-1]
    corners = [(few, decodes[few][0]), (many, decodes[many][-1]), (few, decodes[few][-1]), (many, decodes[many][0])]
    first = [ProbeBurst(rows, context, DECODED) for rows, context in dict.fromkeys(corners)]
    rest = [ProbeBurst(rows, context, DECODED) for rows in sizes for context in decodes[rows]]
    rest += [ProbeBurst(1, context, FIRST_TOKEN) for context in contexts]
    rest = [burst for burst in rest if burst not in first]
    rng = random.Random(seed)
    found = []
    for _ in range(REPEATS):
        found += first + rng.sample(rest, len(rest))
    return found
