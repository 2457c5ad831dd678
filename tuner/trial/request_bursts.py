"""Bursts of equal requests with random prompts, for step traces with batches of designed sizes."""

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from loadgen.errors import TargetError
from loadgen.target.target import Target
from loadgen.workloads.prompts.vocabulary import CANDIDATES

# Output tokens of a request in a prefill burst, and in a decode batch.
FIRST_TOKEN, DECODED = 1, 8
ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ProbeBurst:
    """Equal requests that are sent together. adapters: number of LoRA adapters, used one after the other; 0 is none."""

    count: int
    input_tokens: int
    output_tokens: int
    adapters: int = 0


def send_bursts(target: Target, bursts: Sequence[ProbeBurst], seconds: float, adapters: Sequence[str] = ()) -> None:
    """Send the bursts, each after the answers to the one before. No burst begins after `seconds`.

    adapters: the ids of the server's LoRA adapters. Raises TargetError.
    """
    rng = random.Random(0)
    deadline_s = time.monotonic() + seconds
    with ThreadPoolExecutor(max((burst.count for burst in bursts), default=1)) as threads:
        for burst in bursts:
            if time.monotonic() > deadline_s:
                return
            bodies = [_body(burst, rng, adapters, number) for number in range(burst.count)]
            list(threads.map(lambda body: _post(target, body), bodies))


def _body(burst: ProbeBurst, rng: random.Random, adapters: Sequence[str], number: int) -> bytes:
    """A burst's request of that number, with random words, which the server truncates to the length."""
    text = " ".join(rng.choices(CANDIDATES, k=burst.input_tokens))
    parameters: dict[str, Any] = {
        "truncate": burst.input_tokens,
        "max_new_tokens": burst.output_tokens,
        "ignore_eos_token": True,
        "do_sample": False,
    }
    if burst.adapters:
        parameters["adapter_id"] = adapters[number % burst.adapters]
    return json.dumps({"inputs": text, "parameters": parameters}).encode()


def _post(target: Target, body: bytes) -> None:
    control = target.control()
    try:
        status, _ = control.post("/generate", body, timeout_s=ANSWER_TIMEOUT_S)
    finally:
        control.close()
    if status != 200:
        raise TargetError(f"a request of a burst returned status {status}", status)
